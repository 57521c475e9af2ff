"""A campaign of the faults of a cluster, on a real slurmctld."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from campaign_slurm import ClusterCampaign
from slurm_cluster import Cluster

from slurm_rlhf.campaign.faults import SLURM
from slurm_rlhf.campaign.result import Campaign
from slurm_rlhf.campaign.workload import write_workload

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.mark.campaign
@pytest.mark.timeout(7200)
def test_faults_of_a_cluster(slurm: Cluster, tmp_path: Path) -> None:
    """Nodes that crash and are cut off, srun and slurmd that are killed, slurmctld that starts anew."""
    began, rows = time.monotonic(), []
    for row in ClusterCampaign(slurm, write_workload(slurm.shared / "work")).run(SLURM):
        rows.append(row)
        print(row, flush=True)
    campaign = Campaign(0, rows, seconds=time.monotonic() - began)
    campaign.write(tmp_path)
    print("\n".join(campaign.summary()), f"\nthe table is {tmp_path / 'campaign.html'}")
    assert [f"{row.fault}: {'; '.join(row.problems)}" for row in rows if not row.good] == []
    assert len(rows) == len(SLURM)
