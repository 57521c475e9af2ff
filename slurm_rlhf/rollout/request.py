"""One response to be sampled."""

from __future__ import annotations

from dataclasses import dataclass

from slurm_rlhf.records import I32, Sampling


@dataclass(slots=True)
class GenerateRequest:
    """n samples of a prompt are n requests, each with a seed of its own."""

    key: str  # unique among the requests that an engine holds at one time
    prompt: int  # Prompt.index
    sample: int  # 0 .. n-1
    prompt_ids: I32  # [P], at least one token
    sampling: Sampling  # `n` plays no part here
    seed: int  # from `seeds.request_seed`
