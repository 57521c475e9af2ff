"""The bench of sampling while the actor trains: its workload is what it says, and both modes train on all of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import inflight
import pytest
from inflight import LongTail
from waiting import HANG_S


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.full
def test_both_modes_train_on_the_same_tokens(tmp_path: Path) -> None:
    """The model's responses have the lengths that its prompts say, whatever the engines do meanwhile."""
    words = (
        "--prompts=6",
        "--samples=2",
        "--steps=3",
        "--repeats=1",
        "--median=8",
        "--longest=64",
        "--hidden=64",
        "--layers=1",
        "--json",
    )
    command = [sys.executable, inflight.__file__, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    expected = result["samples"] * int(LongTail(8, 1.0, 64).lengths(18, 0).sum())
    for mode in ("drain", "inflight"):
        (run,) = result["runs"][mode]
        assert run["tokens"] == expected
        assert run["tokens_per_s"] == pytest.approx(expected / run["seconds"])
    assert result["runs"]["drain"][0]["staleness_max"] == 0
    assert result["runs"]["inflight"][0]["staleness_max"] <= result["queue"]
    assert result["ratio"] == pytest.approx(result["inflight"] / result["drain"])
