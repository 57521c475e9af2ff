"""Campaigns of real runs: a slice of the faults with -m full, sixty of them with -m campaign."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from campaign.draw import draw, runnable
from campaign.faults import Fault, all_faults
from campaign.leader import Leader, ThisMachine
from campaign.result import carried_out
from campaign.verdicts import FAILED, Row
from campaign.warm import WarmStart
from waiting import scaled

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SLICE = (
    "clock jump -1 h: all of the run",
    "truncated messages: control port",
    "SIGKILL: critic rank 0 in train",
    "newest checkpoint flipped bit: run directory",
    "SIGKILL: conductor in checkpoint",
)


def done(out: Path, faults: Sequence[Fault], seed: int, calm_steps: int | None = None) -> list[Row]:
    """The rows of a campaign whose table is in `out`."""
    leader = Leader(out, ThisMachine(WarmStart(out), seed), seed, calm_steps)
    return carried_out(leader.run(faults), seed, out)


def wrong(rows: Sequence[Row]) -> list[str]:
    return [f"{row.fault}: {'; '.join(row.problems)}" for row in rows if not row.good]


@pytest.mark.full  # test_run_failures and test_run_training kill ranks and the conductor
def test_a_slice_of_the_faults(tmp_path: Path) -> None:
    """Two that a run bears, a rank and a conductor that are killed, and a checkpoint that is damaged between them."""
    known = {fault.name: replace(fault, limit_s=scaled(fault.limit_s)) for fault in all_faults()}
    rows = done(tmp_path, [known[name] for name in SLICE], 0, calm_steps=60)
    assert wrong(rows) == []
    assert {row.fault for row in rows} == set(SLICE)
    assert all(row.compared >= 1 and row.equal for row in rows)
    stated = json.loads((tmp_path / "campaign.json").read_text())
    assert stated["good"]
    assert {row["fault"] for row in stated["rows"] if row["culprit"]} == set(SLICE[2:])


@pytest.mark.campaign
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("seed", [0])
def test_sixty_faults(tmp_path: Path, seed: int) -> None:
    rows = done(tmp_path, draw(runnable(all_faults()), 60, seed), seed)
    assert wrong(rows) == []
    assert len(rows) == 60
    assert not [row for row in rows if row.outcome == FAILED or row.left]
