"""Keep what opens doors out of what is shown: values of variables such as WANDB_API_KEY."""

from __future__ import annotations

import re
from collections.abc import Mapping

_NAME = re.compile(r"(^|_)(API_?KEY|TOKEN|PASSWORD|SECRET|CREDENTIALS?)$")
_SET = re.compile(r"\b([A-Z][A-Z0-9_]*)=\S")
_SHORTEST = 6  # characters: a shorter value would blot out words


def without_secrets(text: str, environment: Mapping[str, str]) -> str:
    """Replace each secret value of the environment in `text` by its variable's name."""
    for name, value in environment.items():
        if _NAME.search(name) and len(value) >= _SHORTEST:
            text = text.replace(value, f"${name}")
    return text


def secrets_set(text: str) -> list[str]:
    """Name the variables that hold secrets and that a line of shell sets: `export WANDB_API_KEY=...`."""
    return [name for name in _SET.findall(text) if _NAME.search(name)]
