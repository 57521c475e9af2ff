"""Campaigns whose runs are forked from a process that has imported their libraries."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from training_runs import COMMAND
from warm_runs import WarmRun


class WarmCommand(WarmRun):
    """Implements `campaign.session.Started`."""

    def __init__(self, words: Sequence[str], kept: Path) -> None:
        """`kept`: a file for what it printed, once it is over."""
        super().__init__([*COMMAND[:-1], *words], {**os.environ, "CUDA_VISIBLE_DEVICES": ""})
        self._kept = kept

    def output(self) -> str:
        text = self.printed()
        self._kept.write_text(text)
        return text


class WarmStart:
    """How a campaign starts its commands; what they printed goes into a directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._count = 0

    def __call__(self, words: Sequence[str]) -> WarmCommand:
        self._count += 1
        return WarmCommand(words, self._directory / f"output.{self._count}.log")
