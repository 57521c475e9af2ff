"""Which node is dead of those whose ranks did not say hello."""

from __future__ import annotations

from slurm_rlhf.controller.casualty import unheard
from slurm_rlhf.placement.rank_map import NodeShare

SHARES = [NodeShare("n1", (0,), (0,)), NodeShare("n2", (0,), (1,)), NodeShare("n3", (0,), (2,))]


def test_the_only_node_of_which_nobody_is_heard_is_dead() -> None:
    """No rank of the role came, because their torchruns wait for each other; other roles speak for two of the nodes."""
    assert unheard(SHARES, (), {"n1", "n3"}) == SHARES[1]
    assert unheard(SHARES, (0,), {"n3"}) == SHARES[1]


def test_of_several_silent_nodes_none_is_blamed() -> None:
    assert unheard(SHARES, (), {"n1"}) is None
    assert unheard(SHARES, (0, 2), ()) is None
    assert unheard(SHARES, (), {"n1", "n2", "n3"}) is None
