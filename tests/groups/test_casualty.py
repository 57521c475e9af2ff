"""Which node is dead: of those whose ranks did not say hello, and of those whose ranks are not heard any more."""

from __future__ import annotations

from collections.abc import Sequence

from slurm_rlhf.groups.deaths import silent_nodes, unheard
from slurm_rlhf.placement.rank_map import NodeShare
from slurm_rlhf.wire.roster import Peer

SHARES = [NodeShare("n1", (0,), (0,)), NodeShare("n2", (0,), (1,)), NodeShare("n3", (0,), (2,))]


def nobody(nodes: Sequence[str]) -> list[str]:
    raise AssertionError(f"{nodes}: nothing is to be started where one node alone is silent")


def test_the_only_node_of_which_nobody_is_heard_is_dead() -> None:
    """No rank of the role came, because their torchruns wait for each other; other roles speak for two of the nodes."""
    assert unheard(SHARES, (), {"n1", "n3"}, nobody) == [SHARES[1]]
    assert unheard(SHARES, (0,), {"n3"}, nobody) == [SHARES[1]]
    assert unheard(SHARES, (0, 2), (), nobody) == []
    assert unheard(SHARES, (), {"n1", "n2", "n3"}, nobody) == []


def test_of_several_silent_nodes_those_are_dead_where_nothing_can_be_started() -> None:
    """They have one waiting role only, so nobody speaks for those that live."""
    assert unheard(SHARES, (), {"n1"}, lambda nodes: [node for node in nodes if node == "n3"]) == [SHARES[2]]
    assert unheard(SHARES, (), (), lambda nodes: ["n1", "n3", "n9"]) == [SHARES[0], SHARES[2]]
    assert unheard(SHARES, (), {"n1"}, lambda nodes: []) == []


def peer(role: str, rank: int, host: str, lost: str = "", silent: bool = False) -> Peer:
    return Peer(role, rank, 2, host, 100 + rank, lost=lost, silent=silent)


def test_a_node_whose_ranks_are_silent_is_gone_unless_one_of_them_speaks() -> None:
    one, two, critic = peer("actor", 0, "n1"), peer("actor", 1, "n2"), peer("critic", 0, "n2")
    assert silent_nodes([one, two], []) == set()
    assert silent_nodes([one, two], [two]) == {"n2"}
    assert silent_nodes([one, two, critic], [two]) == set()
    assert silent_nodes([one, peer("actor", 1, "n2", "not heard from for 12 s", silent=True)], []) == {"n2"}
    assert silent_nodes([one, two, critic], [two, critic]) == {"n2"}


def test_a_live_node_whose_engine_is_importing_is_not_gone() -> None:
    """The rank beside it was killed, or ended to start elsewhere: the engine has said no hello, so nobody is heard."""
    one = peer("actor", 0, "n1")
    assert silent_nodes([one, peer("actor", 1, "n2", "its torchrun ended: Killed")], []) == set()
    assert silent_nodes([one], []) == set()


def test_a_node_that_died_before_its_first_hello_is_gone_until_it_is_heard() -> None:
    one = peer("actor", 0, "n1")
    assert silent_nodes([one], [], dead=("n2",)) == {"n2"}
    assert silent_nodes([one, peer("actor", 1, "n2")], [], dead=("n2",)) == set()
