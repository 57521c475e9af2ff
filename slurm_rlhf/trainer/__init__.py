"""One rank's side of training: trained and frozen models.

`trainers` has policy and value model with their losses, `frozen` reference and reward model; `models` loads all
of them, and `generation` lets the policy sample between optimizer steps. Below the losses is the seam
`trainer.Trainer`, which `deepspeed` and `plain_torch` implement and `backends` chooses from: no other file names one.
Imported by `ranks`, `stages`, `bench` and `parity`; may import torch and `config`, `records`, `errors`, `data`,
`algorithms`, `observe`, `placement` and `checkpoint`. Private names and submodules of libraries are used in
`_deepspeed`, `_transformers` and `_torch` only, whose docstrings list them for tests/house/test_fences.py.

To add a trained model: its module and loader in `models`, a subclass of `trainers.TrainedModel` with `_load` and
`_loss`, and its role in `ranks`. To add a trainer: .github/CONTRIBUTING.md.
"""
