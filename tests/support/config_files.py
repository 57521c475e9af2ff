"""Configuration files of a test's own, and what is said of those that cannot be used."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_rlhf.config.load import load_config
from slurm_rlhf.errors import ConfigError


def write(directory: Path, text: str, name: str = "run.toml") -> Path:
    file = directory / name
    file.write_text(text, encoding="utf-8")
    return file


def refused(path: Path | None, *overrides: str) -> str:
    """Return why a file under `overrides` is no configuration."""
    with pytest.raises(ConfigError) as caught:
        load_config(path, list(overrides))
    return str(caught.value)
