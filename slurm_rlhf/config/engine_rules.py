"""Rules over rollout.engine: who samples, engines of their own or the actor's ranks, and which keys that leaves."""

from __future__ import annotations

from collections.abc import Iterator

from slurm_rlhf.config.keys import all_keys, get
from slurm_rlhf.config.roles import has_engines
from slurm_rlhf.config.schema import Config

OF_ENGINES = ("vllm.", "sync.")
"""Beginnings of the keys that have no meaning without engines."""

OF_ACTOR = "rollout.hf_"


def engine_problems(config: Config) -> Iterator[str]:
    """Find the keys that the engine excludes."""
    if has_engines(config):
        for name in _changed((OF_ACTOR,), config):
            yield (
                f"{name} = {get(config, name)} is of rollout.engine = hf and has no effect with rollout.engine = vllm: "
                "leave one of the two out"
            )
        return
    hf = "rollout.engine = hf"
    if config.vllm.sync_mode == "inflight":
        yield (
            f"vllm.sync_mode = inflight samples while the actor trains, and with {hf} the actor's own ranks sample: "
            "use vllm.sync_mode = drain, or rollout.engine = vllm"
        )
    if config.vllm.tensor_parallel_size > 1:
        yield (
            f"vllm.tensor_parallel_size = {config.vllm.tensor_parallel_size} cuts an engine, and {hf} has none: a "
            "model that is too large for one GPU is cut by ds.zero_stage = 3. Leave the key out, or use "
            "rollout.engine = vllm"
        )
    if config.vllm.dtype != "auto":
        yield (
            f"vllm.dtype = {config.vllm.dtype} is the precision of engines, and {hf} samples in that of the actor, "
            f"ds.param_dtype = {config.ds.param_dtype}: leave the key out"
        )
    if config.eval.overlap:
        yield f"eval.overlap has engines evaluate while the actor trains, and {hf} has none: leave the key out"
    if config.ds.enable_sleep:
        yield f"ds.enable_sleep makes room for engines, and {hf} has none: leave the key out"
    if config.rollout.hf_gather != "auto" and config.ds.zero_stage != 3:
        yield (
            f"rollout.hf_gather = {config.rollout.hf_gather} says how parameters are gathered that ds.zero_stage = 3 "
            f"has cut, and ds.zero_stage = {config.ds.zero_stage} cuts none: leave the key out"
        )


def unused_note(config: Config) -> str:
    """Name the keys of engines that were set and have no effect, because the actor samples; empty: none."""
    unused = [] if has_engines(config) else _changed(OF_ENGINES, config)
    if not unused:
        return ""
    return f"rollout.engine = hf: the actor's ranks sample, so {', '.join(unused)} have no effect"


def _changed(beginnings: tuple[str, ...], config: Config) -> list[str]:
    initial = Config()
    return [name for name in all_keys() if name.startswith(beginnings) and get(config, name) != get(initial, name)]
