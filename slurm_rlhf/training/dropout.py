"""Switch off everything random in a forward pass: the old and the new policy must differ by their weights alone."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RANDOM = re.compile(r"drop|jitter|noise")
"""In the names of numbers that say how random a forward pass in train mode is: `attention_dropout`, `resid_pdrop`,
`layerdrop`, `router_jitter_noise`, `moe_jitter_eps`, ... as transformers spells them."""


KEPT = {"phimoe": {"router_jitter_noise"}}
"""model_type -> numbers with such a name that are not random: PhiMoE's says how far from the best an expert may be."""

SAMPLERS = {"PhimoeTopKRouter"}
"""Modules that draw at random in train mode whatever their settings are: PhiMoE's router samples its experts."""


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
