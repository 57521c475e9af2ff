"""Where ranks go when nodes are gone."""

from __future__ import annotations

import pytest

from slurm_rlhf.errors import PlacementError
from slurm_rlhf.placement.rank_map import RankMap, place
from slurm_rlhf.placement.replacement import replaced, with_engine_on
from slurm_rlhf.placement.role_sizes import RoleSize
from slurm_rlhf.placement.topology import CPU, Node, Topology

ROLES = [RoleSize("actor", 2, 6), RoleSize("rollout", 2, tp=2, engines=2)]


def test_a_free_node_takes_the_ranks_and_nobody_else_moves() -> None:
    ranks = place(Topology.uniform(["n1", "n2"], 8), ROLES)
    allocation = Topology((Node("n1", 8), Node("n2", 8), Node("n3", 4), Node("n4", 8)))
    after = replaced(ranks, {"n1"}, allocation, ROLES)
    assert after.used_nodes == ["n4", "n2"]
    for role in ("actor", "rollout"):
        assert after.roles[role][1] == ranks.roles[role][1]
        assert after.roles[role][0].ranks == ranks.roles[role][0].ranks
        assert after.roles[role][0].gpus == ranks.roles[role][0].gpus
    assert after.topology.node("n4").gpus == 8


def test_without_gpus_any_node_will_do() -> None:
    ranks = place(Topology((Node("n1", 2, 4), Node("n2", 2, 4)), CPU), [RoleSize("actor", 2, 2)])
    after = replaced(ranks, {"n2"}, Topology((Node("n1", 1, 4), Node("n2", 1, 4), Node("n3", 1, 8)), CPU), [])
    assert (after.topology.nodes[1].gpus, after.topology.nodes[1].cpus) == (2, 8)
    assert [share.node for share in after.roles["actor"]] == ["n1", "n3"]


def test_fewer_nodes_hold_the_same_sizes_where_there_is_room() -> None:
    roles = [RoleSize("actor", 1, 2), RoleSize("critic", 1, 2), RoleSize("rollout", 1, tp=1, engines=2)]
    topology = Topology.uniform(["n1", "n2", "n3"], 8)
    ranks = place(topology, roles)
    assert len(ranks.used_nodes) == 3
    after = replaced(ranks, {"n2"}, topology, roles)
    assert set(after.used_nodes) <= {"n1", "n3"}
    assert after.worlds == ranks.worlds


def test_what_is_missing_is_said() -> None:
    topology = Topology.uniform(["n1", "n2"], 8)
    ranks = place(topology, ROLES)
    with pytest.raises(PlacementError, match=r"no free node of the allocation can stand in for n2 \(0 are free\), and"):
        replaced(ranks, {"n2"}, topology, ROLES)
    with pytest.raises(PlacementError, match=r"and no node is left\. Keep one in reserve: cluster\.spares"):
        replaced(ranks, {"n1", "n2"}, topology, ROLES)


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
