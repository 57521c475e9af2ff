"""The range of every number in the schema. A test fails when a number is missing here."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from slurm_rlhf.config.keys import all_keys, get
from slurm_rlhf.config.schema import Config


@dataclass(frozen=True, slots=True)
class Range:
    """low <= value <= high; `above` and `below` leave out the end."""

    low: float = -math.inf
    high: float = math.inf
    above: bool = False
    below: bool = False

    def __contains__(self, value: float) -> bool:
        low = self.low < value if self.above else self.low <= value
        return low and (value < self.high if self.below else value <= self.high)

    def __str__(self) -> str:
        low = "" if self.low == -math.inf else f"{'above' if self.above else 'at least'} {self.low:.12g}"
        high = "" if self.high == math.inf else f"{'below' if self.below else 'at most'} {self.high:.12g}"
        return " and ".join(part for part in (low, high) if part)


ANY = Range()
COUNT = Range(1)
NOT_NEGATIVE = Range(0)
POSITIVE = Range(0, above=True)
SHARE = Range(0, 1)
TEMPERATURE = Range(0, 2, above=True)
"""vLLM refuses requests above 2."""

RANGES: dict[str, Range] = {
    "data.max_len": Range(2),
    "data.max_samples": NOT_NEGATIVE,
    "actor.num_nodes": COUNT,
    "actor.num_gpus_per_node": COUNT,
    "actor.learning_rate": NOT_NEGATIVE,
    "actor.lr_warmup_ratio": SHARE,
    "actor.lr_min_ratio": SHARE,
    "actor.adam_betas": Range(0, 1, below=True),
    "actor.weight_decay": NOT_NEGATIVE,
    "actor.max_norm": NOT_NEGATIVE,
    "actor.eps_clip": POSITIVE,
    "actor.eps_clip_low_high": POSITIVE,
    "actor.entropy_coef": ANY,
    "critic.num_nodes": COUNT,
    "critic.num_gpus_per_node": COUNT,
    "critic.learning_rate": NOT_NEGATIVE,
    "critic.value_clip": NOT_NEGATIVE,
    "critic.freezing_steps": NOT_NEGATIVE,
    "ref.num_nodes": COUNT,
    "ref.num_gpus_per_node": COUNT,
    "ref.zero_stage": Range(0, 3),
    "reward.num_nodes": COUNT,
    "reward.num_gpus_per_node": COUNT,
    "reward.zero_stage": Range(0, 3),
    "reward.clip_range": ANY,
    "rollout.batch_size": COUNT,
    "rollout.n_samples_per_prompt": COUNT,
    "rollout.max_new_tokens": COUNT,
    "rollout.temperature": TEMPERATURE,
    "rollout.top_p": Range(0, 1, above=True),
    "rollout.top_k": Range(-1),
    "vllm.num_engines": COUNT,
    "vllm.tensor_parallel_size": COUNT,
    "vllm.num_nodes": NOT_NEGATIVE,
    "vllm.gpu_memory_utilization": Range(0, 1, above=True),
    "vllm.cpu_kvcache_gib": POSITIVE,
    "vllm.max_num_seqs": COUNT,
    "ds.zero_stage": Range(0, 3),
    "algo.advantage.gamma": SHARE,
    "algo.advantage.lambd": SHARE,
    "algo.kl.init_coef": NOT_NEGATIVE,
    "algo.kl.target": NOT_NEGATIVE,
    "algo.kl.horizon": COUNT,
    "train.batch_size": COUNT,
    "train.max_epochs": COUNT,
    "train.num_episodes": COUNT,
    "train.max_steps": NOT_NEGATIVE,
    "train.max_tokens_per_gpu": COUNT,
    "train.forward_max_tokens_per_gpu": NOT_NEGATIVE,
    "train.logprob_chunk_tokens": COUNT,
    "train.async_queue_size": COUNT,
    "train.seed": Range(0, 2**32 - 1),
    "train.gpu_memory_gb": NOT_NEGATIVE,
    "train.self_check_stop": NOT_NEGATIVE,
    "train.threads_per_rank": NOT_NEGATIVE,
    "train.kernel_cache_gib": POSITIVE,
    "eval.steps": NOT_NEGATIVE,
    "eval.temperature": Range(0, 2),
    "eval.n_samples_per_prompt": COUNT,
    "eval.max_samples": NOT_NEGATIVE,
    "ckpt.save_steps": NOT_NEGATIVE,
    "ckpt.max_num": COUNT,
    "sync.bucket_mb": NOT_NEGATIVE,
    "slurm.nodes": NOT_NEGATIVE,
    "slurm.gpus_per_node": NOT_NEGATIVE,
    "slurm.cpus_per_task": NOT_NEGATIVE,
    "slurm.signal_lead_s": NOT_NEGATIVE,
    "sft.learning_rate": POSITIVE,
    "sft.batch_size": COUNT,
    "sft.max_epochs": COUNT,
    "sft.max_steps": NOT_NEGATIVE,
} | {name: POSITIVE for name in all_keys() if name.startswith("timeout.")}


def out_of_range(config: Config) -> Iterator[str]:
    """One sentence per number that is outside its range."""
    for name, allowed in RANGES.items():
        value = get(config, name)
        for number in value if isinstance(value, list) else [value]:
            if number not in allowed:
                yield f"{name} must be {allowed}, got {number}"
