"""A campaign of real runs: sixty faults, with -m campaign."""

from __future__ import annotations

from pathlib import Path

import pytest
from campaign.draw import draw, runnable
from campaign.faults import all_faults
from campaign.leader import Leader, ThisMachine
from campaign.result import carried_out
from campaign.verdicts import FAILED
from campaign.warm import WarmStart

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SEED = 0


@pytest.mark.campaign
@pytest.mark.timeout(7200)
def test_sixty_faults(tmp_path: Path) -> None:
    leader = Leader(tmp_path, ThisMachine(WarmStart(tmp_path), SEED), SEED)
    rows = carried_out(leader.run(draw(runnable(all_faults()), 60, SEED)), SEED, tmp_path)
    assert [f"{row.fault}: {'; '.join(row.problems)}" for row in rows if not row.good] == []
    assert len(rows) == 60
    assert not [row for row in rows if row.outcome == FAILED or row.left]
