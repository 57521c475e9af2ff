"""The private parts of torch that the training room uses, written for torch 2.13.0.

_C/_VariableFunctions.pyi _fused_sdp_choice(query, key, value, attn_mask, dropout_p, is_causal, *, scale, enable_gqa)
distributed/distributed_c10d.py _world
distributed/distributed_c10d.py _World.pg_map
distributed/distributed_c10d.py _set_pg_timeout(timeout, group)
"""

from __future__ import annotations

from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed import distributed_c10d


def choose_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> int:
    """Return the number in `torch.nn.attention.SDPBackend` of the kernel that these arguments get."""
    choice: int = torch._fused_sdp_choice(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )
    return choice


def limit_collectives(timeout_s: float) -> None:
    """Give every process group of this process the time-out: DeepSpeed makes its own groups with torch's default."""
    for group in distributed_c10d._world.pg_map:
        distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)
