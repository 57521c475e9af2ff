"""An engine that goes on on another node."""

from __future__ import annotations

import pytest

from slurm_rlhf.errors import PlacementError
from slurm_rlhf.placement.rank_map import RankMap, place
from slurm_rlhf.placement.replacement import with_engine_on
from slurm_rlhf.placement.topology import RoleSize, Topology


@pytest.fixture
def ranks() -> RankMap:
    sizes = [RoleSize("actor", 1, 4), RoleSize("rollout", 2, tp=2, engines=4)]
    return place(Topology.uniform(["n1", "n2", "n3"], 4), sizes)


def test_an_engine_moves_with_its_ranks_and_the_others_stay(ranks: RankMap) -> None:
    before = {group.engine: group for group in ranks.tp_groups}
    moved = with_engine_on(ranks, "rollout", 1, "n9")
    after = {group.engine: group for group in moved.tp_groups}
    assert after[1].node == "n9"
    assert after[1].ranks == before[1].ranks
    assert after[1].gpus == (0, 1)
    assert {engine: group for engine, group in after.items() if engine != 1} == {
        engine: group for engine, group in before.items() if engine != 1
    }
    assert moved.topology.node("n9").gpus == 4
    assert moved.world("rollout") == ranks.world("rollout")
    assert moved.roles["actor"] == ranks.roles["actor"]
    both = with_engine_on(moved, "rollout", 2, "n9")
    assert {g.engine: (g.node, g.gpus) for g in both.tp_groups}[2] == ("n9", (2, 3))
    assert RankMap.from_json(both.to_json()).roles == both.roles
    assert before[1].node not in [share.node for share in with_engine_on(both, "rollout", 0, "n8").roles["rollout"]]


def test_a_node_without_room_is_refused(ranks: RankMap) -> None:
    full = next(share.node for share in ranks.roles["actor"])
    with pytest.raises(PlacementError, match="has no 2 free slots for engine 1"):
        with_engine_on(ranks, "rollout", 1, full)
