"""A campaign of the faults of a cluster, on a real slurmctld."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from campaign.cluster import FEWEST_STEPS, STEPS_EACH, OnSlurm
from campaign.cluster_faults import SPARES, layout
from campaign.draw import draw
from campaign.faults import EACH, SLURM, named
from campaign.leader import Leader
from campaign.result import carried_out
from campaign.verdicts import RECOVERED
from slurm_cluster import Cluster
from waiting import scaled

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SEED = 0


@pytest.mark.campaign
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("each", EACH)
def test_faults_of_a_cluster(slurm: Cluster, tmp_path: Path, each: int) -> None:
    """Nodes that crash and are cut off, ranks, srun and slurmd that are killed, slurmctld that starts anew.

    Each with `each` ranks of a role on a node; a rank that is killed is the first or the last of its role.
    """
    known = [replace(fault, limit_s=scaled(fault.limit_s)) for fault in SLURM if fault.each == each]
    faults = draw(known, len(known), SEED)
    out, steps = slurm.shared / f"campaign{each}", max(FEWEST_STEPS, STEPS_EACH * len(faults))
    leader = Leader(out, OnSlurm(slurm, SEED), SEED, steps, layout(out, each))
    rows = carried_out(leader.run(faults), SEED, tmp_path)
    assert [f"{row.fault}: {'; '.join(row.problems)}" for row in rows if not row.good] == []
    assert [row.fault for row in rows if not row.compared] == []  # the calm run was longer
    assert len(rows) == len(known)


@pytest.mark.campaign
@pytest.mark.timeout(900)
def test_a_spare_node_that_dies_while_it_takes_over_is_replaced_by_the_next(slurm: Cluster, tmp_path: Path) -> None:
    """Nobody on it has said hello: it is known by the silence of all of its ranks while the other node is heard."""
    (fault,) = (one for one in named(list(SLURM), "one after the other") if one.each == 1)
    leader = Leader(slurm.shared / "spares", OnSlurm(slurm, SEED), SEED, FEWEST_STEPS, SPARES)
    (row,) = carried_out(leader.run([fault]), SEED, tmp_path)
    assert row.good, row.problems
    assert row.outcome == RECOVERED
    assert row.equal
    # Rank 0, on a node that lives, may have said hello by then; rank 1 cannot.
    missing = r"(0 of 2 ranks said hello within 55 s; missing: 0, 1|1 of 2 ranks said hello within 55 s; missing: 1);"
    assert re.search(rf"rank 1 on \w+ is lost before its hello: actor: {missing}", row.said)
