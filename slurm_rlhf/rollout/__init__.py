"""Engines that sample responses to prompts: the interface, vLLM behind it, tensor parallelism; and transformers.

`engine.Engine` is what a rollout rank calls; `vllm_engine` implements it on one rank and `tp_engine` on several.
`hf_generation` samples with a model of transformers, for the actor's ranks; `hf_sampling` chooses its tokens.
Imported by `workers` and `bench`; may import torch and, of the package, `config`, `records`, `errors`, `run_directory`,
`observe` and `placement`. Private names and submodules of vLLM and transformers are used in `_vllm` and `_transformers`
only, whose docstrings list them for tests/house/test_fences.py. To add an engine: a class with the methods of `Engine`,
a fence `_<library>.py`, and a choice in `workers`.
"""
