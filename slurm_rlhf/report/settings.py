"""The configuration of runs: how it differs from the defaults, and from that of another run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slurm_rlhf.config.keys import all_keys, documentation

OWN = ("run_dir", "train.seed", "resume")
"""Keys in which runs of one experiment differ."""


def settings(configs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each key, {"key", "default", "values", "changed", "differs", "about"}; `values`: of each run.

    Keys of another version of the package are shown without a default. Relative paths have become absolute ones in a
    run's config.toml, so a path counts as changed where it is set.
    """
    known = all_keys()
    names = [*known, *sorted({name for config in configs for name in config} - known.keys())]
    found = []
    for name in names:
        values = [_shown(config.get(name)) for config in configs]
        default = _shown(known[name].default) if name in known else None
        found.append(
            {
                **{"key": name, "default": default, "values": values},
                "changed": any(value is not None and value != default for value in values),
                "differs": len(set(map(repr, values))) > 1,
                "about": documentation().get(name, ""),
            }
        )
    return found


def groups(configs: Sequence[dict[str, Any]]) -> list[list[int]]:
    """Return the places of runs that are alike but for their seeds and directories, group by group."""
    found: dict[str, list[int]] = {}
    for place, config in enumerate(configs):
        alike = repr(sorted((name, value) for name, value in config.items() if name not in OWN))
        found.setdefault(alike if config else str(place), []).append(place)
    return list(found.values())


def _shown(value: Any) -> Any:
    """Write a value as TOML has it; None: there is none."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return " ".join(map(str, value)) if value else ""
    return (
        value if value is None or isinstance(value, str) else f"{value:g}" if isinstance(value, float) else str(value)
    )
