"""Engines that sample responses to prompts: the seam, its backends, and engines of several tensor parallel ranks.

`engine.Engine` is what a rank calls. A backend is a module with the name that rollout.engine has in the configuration:
`vllm`, and `hf` for a model of transformers, with which the actor's ranks sample. `tp_engine` makes one engine of
several ranks; `generation_phase` says how far ranks have come that sample together. Imported by `ranks`, `bench`,
`parity` and, without torch, by the conductor; may import torch and, of the package, `config`, `records`, `errors`,
`run_directory`, `observe` and `placement`. Private names and submodules of vLLM and transformers are used in `_vllm`
and `_transformers` only, whose docstrings list them for tests/house/test_fences.py. To add an engine: CONTRIBUTING.
"""
