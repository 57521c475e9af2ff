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
from torch.nn import functional
from torch.nn.attention import SDPBackend

_seen: list[str] = []
_waiting: list[bool] = []


def attention_kernel() -> str:
    """Name the kernel of the first forward pass after the first call of this, as in "sdpa: FLASH_ATTENTION".

    Empty until that pass, and for a model that does not use `scaled_dot_product_attention`, as with the package of
    Flash Attention.
    """
    if not _waiting:
        _waiting.append(True)
        _watch_once()
    return _seen[0] if _seen else ""


def _watch_once() -> None:
    original = functional.scaled_dot_product_attention

    def first(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        functional.scaled_dot_product_attention = original
        choice = torch._fused_sdp_choice(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
        names = {int(backend): name for name, backend in SDPBackend.__members__.items()}
        _seen.append(f"sdpa: {names.get(choice, choice)}")
        return original(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)

    functional.scaled_dot_product_attention = first


def limit_collectives(timeout_s: float) -> None:
    """Give every process group of this process the time-out: DeepSpeed makes its own groups with torch's default."""
    for group in distributed_c10d._world.pg_map:
        distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)
