"""A member that dies while a group is formed: the others let go of it as soon as they are told."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from sync_fleet import Fleet
from waiting import HANG_S

from slurm_rlhf.errors import SyncError
from slurm_rlhf.weights.group import abort_newest, join
from slurm_rlhf.weights.rendezvous import Membership

pytestmark = [pytest.mark.slow]

"""Time-out of the group: without a word from the conductor it would be waited for."""


def test_members_do_not_wait_for_one_that_died_while_they_connect(fleet: Fleet) -> None:
    """It dies when all have met and none is connected; the conductor sees it, and has the leader give the group up."""
    fleet.hire(2)
    where: dict[str, Any] = {"name": "forming", "world": 3, "actors": 1, "host": "127.0.0.1"}
    where |= {"port": fleet.store.port, "timeout_s": HANG_S}
    survivor, victim = fleet.peers
    victim.tell("die_connecting")
    assert victim.answer() is None
    for rank, peer in enumerate(fleet.peers, 1):
        peer.tell("join", rank=rank, label=f"rollout {rank - 1}", **where)

    def conduct() -> None:
        victim.process.wait(HANG_S)
        abort_newest("an engine was lost before the group was formed")

    watching = threading.Thread(target=conduct)
    watching.start()
    with pytest.raises(SyncError, match="an engine was lost before the group was formed"):
        join(Membership(rank=0, label="actor 0", **where))
    answer = survivor.answer()
    watching.join()
    assert answer["error"] == "SyncError"
    assert "an engine was lost before the group was formed" in answer["message"]
    fleet.dismiss()
    fleet.build(2)  # the survivor and a new one form the next group
