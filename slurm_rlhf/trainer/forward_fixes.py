"""Changes to a loaded model: how its layers compute, and that a log-prob depends on text and weights alone.

Layers may be compiled, use kernels of Liger, and keep less for the backward pass. Dropout and other random rates are
switched off: the old and the new policy must differ by their weights alone.

Rotary embeddings whose frequencies follow the length of the text are fixed for a whole run. transformers takes the
longest row of a batch, so that a row's log-probs would depend on the other rows. vLLM decides once: `longrope` uses its
long factors when max_model_len (data.max_len here) is above the original length, `dynamic` the frequencies of
max_position_embeddings. Source: vllm/model_executor/layers/rotary_embedding.
"""

from __future__ import annotations

import importlib
import json
import math
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from slurm_rlhf.errors import ConfigError, ModelError
from slurm_rlhf.trainer._transformers import layers_of, longrope_frequencies

RANDOM = re.compile(r"drop|jitter|noise")
"""Matches the names of numbers that say how random a forward pass in train mode is: `attention_dropout`, `resid_pdrop`,
`layerdrop`, `router_jitter_noise`, `moe_jitter_eps`, ... as transformers spells them."""

KEPT = {"phimoe": {"router_jitter_noise"}}
"""model_type -> numbers with such a name that are not random: PhiMoE's says how far from the best an expert may be."""

SAMPLERS = {"PhimoeTopKRouter"}
"""Modules that draw at random in train mode whatever their settings are: PhiMoE's router samples its experts."""

FIXED = "fixed"  # a type that transformers does not know, so that it leaves the frequencies alone


def switch_off(model: Any) -> None:
    """Put `model` in train mode and set every random rate in its modules and configs to 0.

    `nn.Dropout` is a module; many models call the function with a number of their own or of their config instead.
    """
    model.train()  # Hugging Face recomputes activations in train mode only
    kept = KEPT.get(model.config.get_text_config().model_type, set())
    for module in model.modules():
        kind = type(module).__name__
        if "drop" in kind.lower() and isinstance(getattr(module, "p", None), float):
            module.p = 0.0
        if kind in SAMPLERS:
            module.eval()
        _silence(module, kept)
        for config in _configs(getattr(module, "config", None)):
            _silence(config, kept)


def restore_config(exported: Path, source: Path) -> None:
    """Give the config.json of an export the dropout of its source: it belongs to the model, not to this run."""
    file = exported / "config.json"
    ours, theirs = json.loads(file.read_text(encoding="utf-8")), json.loads((source / "config.json").read_text("utf-8"))
    _restore(ours, theirs)
    file.write_text(json.dumps(ours, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _silence(owner: Any, kept: set[str]) -> None:
    for name, value in list(vars(owner).items()):
        if isinstance(value, float) and RANDOM.search(name) and name not in kept:
            setattr(owner, name, 0.0)


def _configs(config: Any) -> Iterator[Any]:
    """Yield a Hugging Face config and those inside it."""
    if hasattr(config, "to_dict"):
        yield config
        for value in vars(config).values():
            yield from _configs(value)


def _restore(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    for name in list(ours):
        if isinstance(ours[name], dict) and isinstance(theirs.get(name), dict):
            _restore(ours[name], theirs[name])
        elif isinstance(ours[name], float) and RANDOM.search(name):
            if name in theirs:
                ours[name] = theirs[name]
            else:
                del ours[name]


# --- rotary embeddings -----------------------------------------------------------------------------------------------


def fix_frequencies(model: nn.Module, max_len: int, where: str) -> None:
    """Give every rotary embedding in `model` the frequencies that an engine for `max_len` tokens has.

    `max_len` 0: for as many tokens as the model has positions.

    Raises ModelError, naming `where`, when that cannot be done for this model.
    """
    for module in model.modules():
        types = getattr(module, "rope_type", None)
        for layer, kind in types.items() if isinstance(types, dict) else [(None, types)]:
            if kind == "longrope":
                _fix_longrope(module, layer, max_len, where)
            elif isinstance(kind, str) and "dynamic" in kind:
                _fix_dynamic(module, layer, max_len, where)


def has_fixed_frequencies(model: nn.Module) -> bool:
    """Tell whether `fix_frequencies` has changed a rotary embedding of `model`."""
    types = [getattr(module, "rope_type", None) for module in model.modules()]
    return any(FIXED in (kind.values() if isinstance(kind, dict) else [kind]) for kind in types)


def _fix_longrope(module: Any, layer: str | None, max_len: int, where: str) -> None:
    config = module.config
    settings = config.rope_parameters if layer is None else config.rope_parameters[layer]
    original, positions = settings["original_max_position_embeddings"], config.max_position_embeddings
    is_long = (max_len or positions) > original
    frequencies, scaling = longrope_frequencies(config, _buffer(module, layer).device, original + is_long, layer)
    stretch = positions / original
    engines = math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 else 1.0
    engines = settings.get("long_mscale" if is_long else "short_mscale") or engines
    if not math.isclose(scaling, engines, rel_tol=1e-6):
        raise ModelError(
            f"{where}: its longrope embedding scales by {scaling:.6g} in transformers and by {engines:.6g} in vLLM, "
            "which uses max_position_embeddings / original_max_position_embeddings alone. Remove factor, "
            "attention_factor, short_mscale and long_mscale from rope_parameters, or use another model."
        )
    _fix(module, layer, frequencies, where)


def _fix_dynamic(module: Any, layer: str | None, max_len: int, where: str) -> None:
    positions = module.config.max_position_embeddings
    if max_len > positions:
        raise ModelError(
            f"{where}: its dynamic rotary embedding changes with the length of the text beyond {positions} positions "
            f"(max_position_embeddings), which engines cannot follow: lower data.max_len = {max_len} to {positions}"
        )
    _fix(module, layer, _buffer(module, layer), where)


def _buffer(module: Any, layer: str | None) -> torch.Tensor:
    frequencies: torch.Tensor = getattr(module, "inv_freq" if layer is None else f"{layer}_inv_freq")
    return frequencies


def _fix(module: Any, layer: str | None, frequencies: torch.Tensor, where: str) -> None:
    module.register_buffer("inv_freq" if layer is None else f"{layer}_inv_freq", frequencies, persistent=False)
    if layer is None:
        module.rope_type = FIXED
    else:
        module.rope_type[layer] = FIXED
    positions = module.config.max_position_embeddings
    short, long = (_angles(module, length, layer) for length in (4, positions))
    if not torch.equal(short, long[:, :4]):
        raise ModelError(
            f"{where}: the rotary embedding of {type(module).__name__} follows the length of the text, and its "
            "frequencies cannot be fixed: a row's log-probs would depend on the other rows. Use another model."
        )


def _angles(module: Any, length: int, layer: str | None) -> torch.Tensor:
    """Return the cosines at positions 0 to `length`, [1, length, D]; beyond 4, of the first four and the last."""
    device = _buffer(module, layer).device
    ids = torch.arange(length, device=device)[None]
    ids = ids if length < 5 else torch.cat([ids[:, :4], ids[:, -1:]], dim=1)
    named = {} if layer is None else {"layer_type": layer}
    with torch.no_grad():
        cos: torch.Tensor = module(torch.zeros(1, device=device), ids, **named)[0]
    return cos


_COSTLY = (
    *("mm", "addmm", "_grouped_mm"),
    *("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention"),
    *("_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention"),
)
"""Operators of torch that take most of a layer's time: matrix products and attention."""
_VARLEN = "torch_attn::_varlen_attn"
"""torch's attention over packed rows, an operator that is there once `torch.nn.attention.varlen` was imported."""


def checkpoint_layers(model: Any, how: str) -> None:
    """Set what the layers of `model`, one of transformers, keep for the backward pass: off: all; full: their inputs.

    selective: the results of matrix products and attention, too, so the backward pass computes norms, rotations and
    activations again. Korthikanti et al., Reducing Activation Recomputation (2022), recompute attention instead: with
    fused attention it is the cheap operators whose results take memory.
    """
    if how == "off":
        return
    kwargs: dict[str, Any] = {"use_reentrant": False}
    if how == "selective":
        kwargs["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)


_SAVED = {getattr(torch.ops.aten, name).default for name in _COSTLY}


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    saved = operator in _SAVED or operator.name().startswith(_VARLEN)
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


def compile_layers(model: Any) -> None:
    """Compile each layer of `model`, one of transformers, when it is first called; layers share what is compiled."""
    for layer in layers_of(model):
        layer.forward = torch.compile(layer.forward, dynamic=True)


def take_liger_kernels(model: Any) -> None:
    """Give `model` Liger's norms, rotations and gated products; its losses and logits stay ours.

    Raises ConfigError without a GPU or the package, and for a model that Liger does not know.
    """
    asked = "ds.use_liger_kernel = true"
    if not torch.cuda.is_available():
        raise ConfigError(f"{asked} needs GPUs, as its kernels are Triton's: leave the key out")
    try:
        liger: Any = importlib.import_module("liger_kernel.transformers")
    except ImportError as error:
        raise ConfigError(f"{asked} needs the package on all nodes: pip install liger-kernel ({error})") from None
    kind, start = model.config.model_type, "apply_liger_kernel_to_"
    apply = getattr(liger, f"{start}{kind}", None)
    if apply is None:
        known = ", ".join(sorted(name.removeprefix(start) for name in dir(liger) if name.startswith(start)))
        raise ConfigError(f"{asked}: Liger knows no model of type {kind}: leave the key out. Known: {known}")
    apply(model=model, cross_entropy=False, fused_linear_cross_entropy=False)
