"""Watching a run after a fault; the run is the test's."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from campaign import watch as watching
from campaign.faults import Fault
from campaign.verdicts import Observation

from slurm_rlhf.run_directory import RunDirectory


class HeldUp:
    """A session that hangs, says so, and ends as soon as what holds it up is taken away."""

    steps = 0

    def __init__(self, root: Path) -> None:
        self.directory, self.members, self.shared_memory = RunDirectory(root), set[Any](), set[str]()
        self.process = SimpleNamespace(poll=lambda: 1 if self.over else None, output=lambda: "")
        self.undone: list[bool] = []  # for each time: whether the session was over

    @property
    def over(self) -> bool:
        return bool(self.undone)

    def look_around(self) -> None:
        pass

    def events(self, known: int) -> list[str]:
        return ["hang: reward: nothing moves"]

    def undo(self) -> None:
        self.undone.append(self.over)

    def kill(self) -> None:
        pass


def test_what_holds_a_run_up_is_taken_away_once_it_was_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "LASTS_S", 0.0)
    session, seen = HeldUp(tmp_path), Observation()
    fault = Fault("hang", "reward function", "score", says="reward")
    watching.watch(session, fault, seen, 0, time.monotonic(), session.undo)  # type: ignore[arg-type]
    assert session.undone == [False, True]  # the second is to make sure of it
    assert (seen.error, seen.went_on, seen.exit_code) == ("", False, 1)
    assert seen.detected_s is not None
    assert seen.ended_s is not None
