"""Read and check the entries of reward.sources, of which each is a part of the reward, and the presets."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from slurm_rlhf.config.schema import Config
from slurm_rlhf.config.schema_models import RewardPart
from slurm_rlhf.errors import meant

FIELDS = tuple(field.name for field in fields(RewardPart))
ENVIRONMENT, BESIDE = "environment", "source"
"""Components of the reward where env.path has another source beside it: the environment's, and that of a source that
is no entry of reward.sources."""
SOURCES = ("remote_url", "function", "preset", "model")
PRESET_LIBRARIES = {
    "math": ("math_verify", "math-verify"),
    "json_schema": ("jsonschema", "jsonschema"),
    "reasoning_gym": ("reasoning_gym", "reasoning-gym"),
}
"""Preset -> the module that it imports, and the package."""
_NAME = re.compile(r"[A-Za-z0-9_.@+-]+")
_TYPES: dict[str, Any] = {"weight": (int, float), "clip": list, "model": bool}


def read_part(name: str, value: Any) -> RewardPart | str:
    """Read one entry of the key `name`; a text says what is wrong with it."""
    if isinstance(value, RewardPart):
        return value
    if not isinstance(value, dict):
        return f"{name} takes tables with name, weight, clip and one of {', '.join(SOURCES)}, got {value!r}"
    for word, inner in value.items():
        if word not in FIELDS:
            return f"{name}: an entry has no {word!r}{meant(word, FIELDS)} (valid: {', '.join(FIELDS)})"
        kind = _TYPES.get(word, str)
        if not isinstance(inner, kind) or (isinstance(inner, bool) and word != "model"):
            return f"{name}: {word} = {inner!r} is of a wrong type"
    part = RewardPart(**value)
    numbers = all(isinstance(each, int | float) and not isinstance(each, bool) for each in part.clip)
    if part.clip and (len(part.clip) != 2 or not numbers or part.clip[0] >= part.clip[1]):
        return f"{name}: clip takes two numbers, the lower first, got {part.clip}"
    return part


def runs_programs(config: Config) -> bool:
    """Tell whether a reward of the run is by unit tests, in a sandbox."""
    return "code" in (config.reward.preset, *(part.preset for part in config.reward.sources))


def part_table(part: RewardPart) -> dict[str, Any]:
    """Return what a user would write for the entry: the fields that are set."""
    empty = RewardPart()
    return {name: getattr(part, name) for name in FIELDS if getattr(part, name) != getattr(empty, name)}


def resolved_part(part: RewardPart, base: Path) -> RewardPart:
    """Return the entry with absolute paths, which start at `base`."""

    def absolute(path: str, is_path: bool) -> str:
        return os.path.abspath(base / Path(path).expanduser()) if path and is_path else path

    file = not part.remote_url.startswith(("http://", "https://"))
    value = absolute(part.preset_value, part.preset == "json_schema")
    return replace(part, remote_url=absolute(part.remote_url, file), preset_value=value)


def part_problems(config: Config) -> Iterator[str]:
    """Check the entries and what is beside them."""
    reward = config.reward
    names = [part.name for part in reward.sources]
    for name, count in Counter(names).items():
        if name == ENVIRONMENT and config.env.path:
            yield f"reward.sources: the name {name!r} is that of the rewards of env.path: choose another"
        if count > 1 or not _NAME.fullmatch(name):
            yield (
                f"reward.sources: the name {name!r} is "
                f"{'there twice' if count > 1 else 'empty or has other characters than letters, digits and _.@+-'}: "
                "each entry needs its own, by which metrics call it"
            )
    for part in reward.sources:
        named = [source for source in SOURCES if getattr(part, source)]
        if len(named) != 1:
            given = " and ".join(named) or "no source"
            yield f"reward.sources, {part.name}: {given} is set: give each entry one of {', '.join(SOURCES)}"
    for key in ("remote_url", "function", "preset"):
        if getattr(reward, key):
            yield f"reward.{key} and reward.sources are both set: make it an entry of reward.sources, or leave one out"
    models = sum(part.model for part in reward.sources)
    if models != bool(reward.model_name_or_path):
        yield (
            f"reward.sources has {models} entries with model = true, and reward.model_name_or_path = "
            f"{reward.model_name_or_path!r}: one entry belongs to one directory of a reward model"
        )


def settings_of(part: RewardPart) -> dict[str, Any]:
    """Return the keys of `reward` for a source that is this entry alone."""
    found = {f"reward.{name}": getattr(part, name) for name in ("remote_url", "function", "preset", "preset_value")}
    return {**found, "reward.sources": [], "reward.model_name_or_path": ""}


PRESET_LIBRARIES = {"math": ("math_verify", "math-verify"), "json_schema": ("jsonschema", "jsonschema")}
"""Preset -> the module that it imports, and the package."""


def preset(config: Config) -> Iterator[str]:
    """Check the preset of the reward: what it needs, and what it takes."""
    name, value = config.reward.preset, config.reward.preset_value
    module, package = PRESET_LIBRARIES.get(name, ("", ""))
    if module and find_spec(module) is None:
        yield f"reward.preset = {name} needs {package}, which is not installed: pip install 'slurm_rlhf[rewards]'"
    if name in ("regex", "json_schema", "length") and not value:
        yield f"reward.preset_value is empty: reward.preset = {name} needs it; slurm-rlhf docs rewards says what for"
    if value and name in ("", "math", "exact"):
        yield f"reward.preset_value = {value} has no effect with reward.preset = {name or 'empty'}: leave it out"
