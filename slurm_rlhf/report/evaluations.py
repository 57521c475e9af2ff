"""The evaluations of a run: the newest of the training, and those that `slurm-rlhf eval` has put beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MOST = 8
"""Evaluations of `slurm-rlhf eval` on a page, the newest."""
_NEEDED = (
    "name",
    "samples",
    "temperature",
    "whole",
    "pass_at",
    "sources",
    "prompt_lengths",
    "response_lengths",
    "failed",
)


def read_evaluations(folder: Path) -> list[dict[str, Any]]:
    """Read the figures in `folder`, {"title", "eval", "datasets"}; what is missing or cut off is left out."""
    steps = sorted(folder.glob("step_*.json"))
    others = sorted(folder.glob("*/eval.json"), key=lambda path: path.stat().st_mtime)[-MOST:]
    titled = [*((path, _step(path)) for path in steps[-1:]), *((path, path.parent.name) for path in others)]
    found = [(title, _figures(path)) for path, title in titled]
    return [{"title": title, **figures} for title, figures in found if figures is not None]


def _step(path: Path) -> str:
    return f"step {int(path.stem.removeprefix('step_'))}" if path.stem[5:].isdigit() else path.stem


def _figures(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        whole = all(set(_NEEDED) <= each.keys() for each in found["datasets"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return {"eval": found.get("eval"), "datasets": found["datasets"]} if whole else None
