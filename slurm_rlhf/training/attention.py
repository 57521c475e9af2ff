"""Which kernel PyTorch's attention runs: asked of its own dispatcher, with the arguments of a real call."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend

_seen: list[str] = []
_waiting: list[bool] = []


def attention_kernel() -> str:
    """ "sdpa: FLASH_ATTENTION", say, of the first forward pass after the first call of this; empty until then.

    Stays empty where the model does not use `scaled_dot_product_attention`, as with Flash Attention's own package.
    """
    if not _waiting:
        _waiting.append(True)
        _watch_once()
    return _seen[0] if _seen else ""


def _watch_once() -> None:
    usual = functional.scaled_dot_product_attention

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
        functional.scaled_dot_product_attention = usual
        choice = torch._fused_sdp_choice(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
        names = {int(backend): name for name, backend in SDPBackend.__members__.items()}
        _seen.append(f"sdpa: {names.get(choice, choice)}")
        return usual(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)

    functional.scaled_dot_product_attention = first
