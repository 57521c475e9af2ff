"""The models that DeepSpeed trains, the frozen ones beside them, and supervised fine-tuning: one rank's side.

`trainers` has policy and value model, `frozen_models` reference and reward model; `models` loads all of them and
`train_engine` takes their optimizer steps, `generation` lets the policy sample between them. Imported by `workers`,
`bench` and `cli`; may import torch and `config`, `records`, `errors`, `data`, `algorithms`, `observe`, `placement` and
`checkpoint`. Private names and submodules of DeepSpeed, transformers and torch are used in `_deepspeed`,
`_transformers` and `_torch` only, whose docstrings list them for tests/house/test_fences.py. To add a trained model:
its module and loader in `models`, a subclass of `trainers.Trainer` with `_load` and `_loss`, and its role in `workers`.
"""
