"""Check the entries of reward.sources, each of which is a part of the reward, and the presets."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

from slurm_rlhf.config.ranges import URLS
from slurm_rlhf.config.schema import Config
from slurm_rlhf.config.schema_models import RewardPart

ENVIRONMENT, OTHER_SOURCE = "environment", "source"
"""Names of the components of the reward if env.path and another source are set: the environment's component, and that
of a source which is not an entry of reward.sources."""
SOURCES = ("remote_url", "function", "preset", "model")
PRESET_LIBRARIES = {
    "math": ("math_verify", "math-verify"),
    "json_schema": ("jsonschema", "jsonschema"),
    "reasoning_gym": ("reasoning_gym", "reasoning-gym"),
}
"""Preset -> the module that it imports, and the package."""
_NAME = re.compile(r"[A-Za-z0-9_.@+-]+")


def runs_programs(config: Config) -> bool:
    """Tell whether a reward of the run runs unit tests, in a sandbox."""
    return "code" in (config.reward.preset, *(part.preset for part in config.reward.sources))


def in_workers(config: Config) -> dict[str, str]:
    """Return the user code that runs in workers: key -> file or name of a reward function, preset or environment."""
    reward, found = config.reward, {"env.path": config.env.path}
    for part in [reward, *reward.sources] if reward.workers else ():
        where = f"reward.sources, {part.name}, " if isinstance(part, RewardPart) else "reward."
        found |= {f"{where}{key}": getattr(part, key) for key in ("remote_url", "function", "preset")}
    return {key: value for key, value in found.items() if value and not value.startswith(URLS)}


def part_problems(config: Config) -> Iterator[str]:
    """Check the entries and the keys that exclude them."""
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
            f"{reward.model_name_or_path!r}: a reward model needs exactly one such entry, and its directory"
        )


def settings_of(part: RewardPart) -> dict[str, Any]:
    """Return the keys of `reward` by which this entry is the only source."""
    found = {f"reward.{name}": getattr(part, name) for name in ("remote_url", "function", "preset", "preset_value")}
    return {**found, "reward.sources": [], "reward.model_name_or_path": ""}


def preset(config: Config) -> Iterator[str]:
    """Check the preset of the reward: the package that it needs, and its preset_value."""
    name, value = config.reward.preset, config.reward.preset_value
    module, package = PRESET_LIBRARIES.get(name, ("", ""))
    if module and find_spec(module) is None:
        yield f"reward.preset = {name} needs {package}, which is not installed: pip install 'slurm_rlhf[rewards]'"
    if name in ("regex", "json_schema", "length") and not value:
        yield f"reward.preset_value is empty: reward.preset = {name} needs it; slurm-rlhf docs rewards says what for"
    if value and name in ("", "math", "exact"):
        yield f"reward.preset_value = {value} has no effect with reward.preset = {name or 'empty'}: leave it out"
