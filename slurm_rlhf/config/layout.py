"""How a model reads micro-batches, and which keys that excludes. Without torch or transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slurm_rlhf.algorithms.layout import Layout
from slurm_rlhf.config.architectures import PACKED
from slurm_rlhf.config.model_directory import read_config, text_config
from slurm_rlhf.config.schema_models import Ds
from slurm_rlhf.errors import ConfigError


def layout_of(ds: Ds, path: str) -> Layout:
    """Tell how the model in `path` reads micro-batches. Raises ModelError, and ConfigError for ds.ulysses_size.

    Attention costs 1 / (12 hidden size) for a pair of tokens: a layer has about 12 hidden^2 parameters, 2 FLOPs a token
    each, and attention, where tokens see half of the others, 2 hidden FLOPs a pair.
    """
    config = text_config(read_config("the model", Path(path)))
    able = ds.packing_samples == "always" or config.get("model_type") in PACKED
    packed = ds.packing_samples != "never" and able and ds.attn_implementation not in ("eager", "flex_attention")
    if ds.ulysses_size > 1:
        _check_cut(ds, path, config, packed)
    return Layout(packed, 1 / (12 * int(config.get("hidden_size") or 1024)), ds.ulysses_size)


def _check_cut(ds: Ds, path: str, config: dict[str, Any], packed: bool) -> None:
    """Check that ds.ulysses_size ranks can compute a row of the model together. Raises ConfigError."""
    asked, heads = f"ds.ulysses_size = {ds.ulysses_size}", int(config.get("num_attention_heads") or 0)
    if ds.attn_implementation != "sdpa":
        raise ConfigError(
            f"{asked} exchanges heads around the trainer's own attention, and ds.attn_implementation = "
            f"{ds.attn_implementation} is another: leave one of the two keys out"
        )
    if not packed:
        raise ConfigError(
            f"{asked} cuts rows in which sequences lie end to end, and the model in {path} has a row for each "
            f"sequence, by ds.packing_samples = {ds.packing_samples}: leave one of the two keys out, or use a model of "
            "`slurm-rlhf docs models`, No padding"
        )
    if not heads or heads % ds.ulysses_size:
        valid = ", ".join(str(size) for size in range(1, heads + 1) if heads % size == 0) or "1"
        raise ConfigError(
            f"{asked} does not divide the {heads} attention heads (num_attention_heads) of the model in {path}. Valid "
            f"sizes: {valid}"
        )
