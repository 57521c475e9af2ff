"""Names of keys that users of OpenRLHF, verl and TRL know: which are read as ours, and what the others are here.

The tables are in `migrate.json`, which is read when a name is met that is no key:

    openrlhf           the flags of OpenRLHF's PPO command: `now` is the spelling since April 2026 (`actor.adam.lr`),
                       `before` the one until then (`actor_learning_rate`); `key` takes the same value here, or
                       `instead` says what to do. Read from `openrlhf/cli/train_ppo_ray.py` of August and April 2026.
    verl, trl          name -> the key that does its work here; values may differ, so errors name it and nothing is read
    units              a name of theirs -> how its number differs
    openrlhf_defaults  key -> OpenRLHF's default, where it differs from ours
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from slurm_rlhf.config.keys import Key, all_keys

VALUES = {
    "actor.lr_scheduler": {"cosine_with_min_lr": "cosine"},
    "actor.policy_loss_type": {"vanilla": "ppo", "dapo": "ppo", "grpo": "ppo"},
}
"""Key -> a value of OpenRLHF, verl or TRL -> what it is here. Named in errors and not read."""

INTERVALS = ("ckpt.save_steps", "eval.steps")
"""Keys for which -1 is never at OpenRLHF and verl, and 0 here."""


@cache
def tables() -> dict[str, Any]:
    """Read migrate.json."""
    found: dict[str, Any] = json.loads(Path(__file__).with_name("migrate.json").read_text(encoding="utf-8"))
    return found


def spellings(flag: dict[str, str]) -> list[str]:
    """List the names of a flag of OpenRLHF, the newer one first."""
    return [flag[age] for age in ("now", "before") if age in flag]


@cache
def read_as() -> dict[str, str]:
    """Return OpenRLHF's spellings that differ from ours: flag -> key."""
    flags = [flag for flag in tables()["openrlhf"] if "key" in flag]
    return {name: flag["key"] for flag in flags for name in spellings(flag) if name != flag["key"]}


def key_of(name: str) -> Key | None:
    """Find the key that `name` is, a key of ours or a flag of OpenRLHF; None: it is neither."""
    return all_keys().get(name) or all_keys().get(read_as().get(name, ""))


@cache
def _instead() -> dict[str, str]:
    flags = [flag for flag in tables()["openrlhf"] if "instead" in flag]
    return {name: flag["instead"] for flag in flags for name in spellings(flag)}


def begins_alias(name: str) -> bool:
    """Return whether `name` is a group of OpenRLHF's that holds keys of ours, as `actor.adam` does."""
    return any(alias.startswith(f"{name}.") for alias in [*read_as(), *_instead()])


def meaning(name: str) -> str:
    """Say what a name of OpenRLHF, verl or TRL is here; empty where it is none of theirs."""
    if name in _instead():
        return f"OpenRLHF's {name} is no key here: {_instead()[name]}"
    for peer in ("verl", "TRL"):
        if key := tables()[peer.lower()].get(name):
            unit = f"; {tables()['units'][name]}" if name in tables()["units"] else ""
            return f"{peer}'s {name} is {key} here{unit} (`slurm-rlhf train --help {key}` says what it takes)"
    return ""
