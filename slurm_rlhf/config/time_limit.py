"""Slurm's ways to write a time limit."""

from __future__ import annotations

import re

from slurm_rlhf.errors import ConfigError

_DAYS = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")


def minutes(text: str) -> int:
    """`90`, `90:00`, `1:30:00`, `3-12`, `3-12:30`, `3-12:30:00` -> minutes, rounded up. Raises ConfigError."""
    match = _DAYS.fullmatch(text.strip())
    if match is None:
        raise ConfigError(
            f"slurm.time = {text!r} is no time limit: write minutes, minutes:seconds, hours:minutes:seconds, "
            "days-hours or days-hours:minutes:seconds, for example 24:00:00"
        )
    days, first, second, third = (int(group) if group else 0 for group in match.groups())
    if match[1] is not None:
        seconds = ((days * 24 + first) * 60 + second) * 60 + third
    elif match[4] is not None:
        seconds = (first * 60 + second) * 60 + third
    else:
        seconds = first * 60 + second
    if seconds == 0:
        raise ConfigError(f"slurm.time = {text!r} is no time at all: write for example 24:00:00")
    return -(-seconds // 60)
