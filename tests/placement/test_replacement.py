"""Where ranks go when nodes are gone."""

from __future__ import annotations

import pytest

from slurm_rlhf.errors import PlacementError
from slurm_rlhf.placement.rank_map import place
from slurm_rlhf.placement.replacement import replaced
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
