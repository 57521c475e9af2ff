"""Puts into words how the models of a run or a stage compute, which both say when they start."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

from slurm_rlhf.config.model_directory import read_config, text_config
from slurm_rlhf.config.roles import ROLES, ROLLOUT
from slurm_rlhf.config.schema import Config
from slurm_rlhf.nodes.environment import allocator
from slurm_rlhf.placement.rank_map import RankMap
from slurm_rlhf.placement.step_time import AGAIN, FASTER


def ways(config: Config, trainers: Collection[str], ranks: RankMap) -> Iterator[str]:
    """Say how models compute and, as far as it is not the default, what ranks exchange and how engines sample."""
    ds, engines = config.ds, ROLLOUT in ranks.roles
    padded = [role for role in trainers if not ROLES[role].layout(config).packed]
    again = AGAIN[config.checkpointing] / 3  # a forward pass is a third of an update
    longer = f" (updates {1 + again:.2f} times as long)" if again else ""
    yield f"activation checkpointing {config.checkpointing}{longer}"
    for role in padded:
        text = text_config(read_config(role, Path(ROLES[role].model(config)[1])))
        yield f"{role} padded ({text.get('model_type')}, ds.packing_samples = {ds.packing_samples})"
    growing = ", ".join(role for role in trainers if allocator(config, ranks, role))
    in_use = {
        "sequences packed": not padded,
        "AdamW fused": not config.train.full_determinism,
        f"GPU memory in growing segments ({growing})": bool(growing),
        f"layers compiled ({dict(FASTER)['ds.compile']} times as fast)": ds.compile,
        f"Liger's kernels ({dict(FASTER)['ds.use_liger_kernel']} times as fast)": ds.use_liger_kernel,
        f"attention {ds.attn_implementation}": ds.attn_implementation != "sdpa",
        f"{ds.ulysses_size} ranks for a sequence (1/{ds.ulysses_size} of its activations each)": ds.ulysses_size > 1,
        f"parameters copied by {ds.hpz_size} ranks (1/{ds.hpz_size} of them more on each GPU)": ds.hpz_size > 1,
        f"gradients summed in {ds.grad_comm_dtype} (half the bytes)": ds.grad_comm_dtype != "fp32",
        f"adapters of rank {config.lora.rank}": config.lora.rank > 0,
        f"sampling ahead (train.async_queue_size = {config.train.async_queue_size})": engines
        and config.vllm.sync_mode == "inflight",
        "KV cache kept over updates (no token is computed anew)": engines and config.vllm.keep_kv_cache,
    }
    yield from (words for words, is_used in in_use.items() if is_used)
