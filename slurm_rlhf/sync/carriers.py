"""Which carrier a group's backend has."""

from __future__ import annotations

from slurm_rlhf.sync.carrier import Carrier
from slurm_rlhf.sync.group import SyncGroup
from slurm_rlhf.sync.plan import SyncPlan
from slurm_rlhf.sync.relay import Relay


def carrier_of(group: SyncGroup, plan: SyncPlan) -> Carrier:
    """This member's carrier, which the group aborts and closes. Collective where connections have to be made."""
    carrier: Carrier = Relay(plan, group.rank, group.control)
    group.adopt(carrier)
    return carrier
