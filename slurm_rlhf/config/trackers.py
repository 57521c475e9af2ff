"""Which trackers there are, and what `logger` may ask of them."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from slurm_rlhf.config.schema import Config
from slurm_rlhf.config.secrets import secrets_set

TENSORBOARD = "tensorboard"

PACKAGES = {"wandb": ("wandb",), "trackio": ("trackio",), "mlflow": ("mlflow", "sqlalchemy", "alembic")}
"""Tracker -> the modules that it needs; its extra in pyproject.toml brings them. TensorBoard is always there."""

NAMES = (TENSORBOARD, *PACKAGES)
"""What logger.use takes."""


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
