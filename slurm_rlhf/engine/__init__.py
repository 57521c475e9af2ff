"""Engines that sample responses to prompts: the seam, its backends, and engines of several tensor parallel ranks.

`engine.Engine` is what a rank calls. A backend is a module with the name that rollout.engine has in the configuration:
`vllm`, and `hf` for a model of transformers, with which the actor's ranks sample. `tp_engine` makes one engine of
several ranks. Imported by `ranks`, `bench`, `parity` and, without torch, by `sampling`; may import torch and, of the
package, `config`, `records`, `errors`, `run_directory`, `observe` and `placement`. Private names and submodules of vLLM
and transformers are used in `_vllm`, `_vllm_updates` and `_transformers` only, whose docstrings list them.
To add an engine: CONTRIBUTING.
"""
