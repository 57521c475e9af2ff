"""List the trackers, check what `logger` asks of them, and find variables that must not be shown."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from importlib.util import find_spec

from slurm_rlhf.config.schema import Config

TENSORBOARD = "tensorboard"

PACKAGES = {"wandb": ("wandb",), "trackio": ("trackio",), "mlflow": ("mlflow", "sqlalchemy", "alembic")}
"""Tracker -> the modules that it needs; its extra in pyproject.toml brings them. TensorBoard is always there."""

NAMES = (TENSORBOARD, *PACKAGES)
"""Names that logger.use takes."""


def tracker_problems(config: Config) -> Iterator[str]:
    """Find trackers that do not exist or are not installed, and keys that would get into config.toml."""
    for name in dict.fromkeys(config.logger.use):
        if name not in NAMES:
            yield f"logger.use: there is no tracker {name!r} (valid: {', '.join(NAMES)})"
        elif missing := [module for module in PACKAGES.get(name, ()) if find_spec(module) is None]:
            verb = "is" if len(missing) == 1 else "are"
            yield (
                f"logger.use: {name} needs {', '.join(missing)}, which {verb} not installed here: "
                f"pip install 'slurm_rlhf[{name}]' (from a checkout: pip install '.[{name}]')"
            )
    for line in config.slurm.setup:
        for variable in secrets_set(line):
            yield (
                f"slurm.setup sets {variable}, and the configuration is copied to run_dir/config.toml and to the "
                "trackers: set it in your own environment, or log in once (`wandb login`, `hf auth login`)"
            )


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
