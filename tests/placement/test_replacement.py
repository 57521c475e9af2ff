"""Where ranks go when nodes are gone."""

from __future__ import annotations

import pytest

from slurm_rlhf.config.keys import changed
from slurm_rlhf.config.roles import colocations
from slurm_rlhf.config.rules import rule_problems
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import PlacementError
from slurm_rlhf.placement.rank_map import RankMap, place, process_slots
from slurm_rlhf.placement.replacement import group_sizes, replaced, smaller_layouts
from slurm_rlhf.placement.topology import CPU, Node, Topology, role_sizes

CONFIG = {
    **{"algo.kl.init_coef": 0, "algo.advantage.estimator": "group_norm", "rollout.n_samples_per_prompt": 4},
    **{"vllm.num_engines": 1, "actor.num_nodes": 1, "actor.num_gpus_per_node": 1},
}
PPO = {"algo.advantage.estimator": "gae", "critic.num_nodes": 1}


def a_config(**keys: object) -> Config:
    """Keys with two underscores for a dot."""
    config = changed(Config(), {**CONFIG, **{key.replace("__", "."): value for key, value in keys.items()}})
    assert list(rule_problems(config)) == []
    return config


def placed(config: Config, topology: Topology) -> RankMap:
    return place(topology, role_sizes(config), colocations(config))


LARGE = a_config(actor__num_nodes=2, actor__num_gpus_per_node=4, vllm__num_engines=2, vllm__tensor_parallel_size=2)


def test_a_free_node_takes_the_ranks_and_nobody_else_moves() -> None:
    ranks = placed(LARGE, Topology.uniform(["n1", "n2"], 6))
    allocation = Topology((Node("n1", 6), Node("n2", 6), Node("n3", 4), Node("n4", 6)))
    found = replaced(ranks, {"n1"}, allocation, LARGE)
    after = found.ranks
    assert after.used_nodes == ["n4", "n2"]
    for role in ("actor", "rollout"):
        assert after.roles[role][1] == ranks.roles[role][1]
        assert after.roles[role][0].ranks == ranks.roles[role][0].ranks
        assert after.roles[role][0].gpus == ranks.roles[role][0].gpus
    assert after.topology.node("n4").gpus == 6
    assert found.change == {}


def test_without_gpus_any_node_will_do() -> None:
    config = a_config(actor__num_nodes=2)
    ranks = placed(config, Topology((Node("n1", 2, 4), Node("n2", 2, 4)), CPU))
    spare = Topology((Node("n1", 1, 4), Node("n2", 1, 4), Node("n3", 1, 8)), CPU)
    after = replaced(ranks, {"n2"}, spare, config).ranks
    assert (after.topology.nodes[1].gpus, after.topology.nodes[1].cpus) == (2, 8)
    assert [share.node for share in after.roles["actor"]] == ["n1", "n3"]


def test_fewer_nodes_hold_the_same_sizes_where_there_is_room() -> None:
    config = a_config(**PPO, actor__num_gpus_per_node=2, critic__num_gpus_per_node=2, vllm__num_engines=2)
    topology = Topology.uniform(["n1", "n2", "n3"], 8)
    ranks = placed(config, topology)
    assert len(ranks.used_nodes) == 3
    found = replaced(ranks, {"n2"}, topology, config)
    assert (found.change, found.words(config)) == ({}, "")
    assert set(found.ranks.used_nodes) <= {"n1", "n3"}
    assert found.ranks.worlds == ranks.worlds
    assert found.ranks.roles["rollout"] == ranks.roles["rollout"]  # the engines live


@pytest.mark.parametrize("accelerator", ["gpu", CPU])
def test_where_there_is_no_room_roles_shrink_as_little_as_the_batches_allow(accelerator: str) -> None:
    """Sixteen actor ranks of two nodes, eight critic ranks, four engines: with a node less the actor halves."""
    config = a_config(
        **PPO,
        **{"actor__num_nodes": 2, "actor__num_gpus_per_node": 8, "critic__num_gpus_per_node": 8},
        **{"vllm__num_engines": 4, "vllm__tensor_parallel_size": 2, "vllm__num_nodes": 1},
    )
    topology = Topology(tuple(Node(f"n{number}", 8, 4) for number in range(1, 5)), accelerator)
    ranks = placed(config, topology)
    assert [share.node for share in ranks.roles["rollout"]] == ["n4"]
    for bad in ("n2", "n3", "n4"):
        found = replaced(ranks, {bad}, topology, config)
        if accelerator == CPU:  # a node without GPUs takes as many processes as there are
            assert found.change == {}
            continue
        assert found.words(config) == "actor.num_nodes = 1 (it was 2)"
        assert found.ranks.worlds == {"actor": 8, "critic": 8, "rollout": 8}
        assert bad not in found.ranks.used_nodes
        assert (found.ranks.roles["rollout"] == ranks.roles["rollout"]) == (bad != "n4")
        assert len({(s.node, slot) for shares in found.ranks.roles.values() for s in shares for slot in s.gpus}) == 24


def test_without_gpus_roles_lose_the_nodes_that_are_gone() -> None:
    config = a_config(actor__num_nodes=2, vllm__num_nodes=2, vllm__num_engines=3)
    topology = process_slots(Topology((Node("n1", 0, 4), Node("n2", 0, 4)), CPU), role_sizes(config))
    ranks = placed(config, topology)
    found = replaced(ranks, {"n2"}, topology, config)
    assert found.change == {"actor.num_nodes": 1, "vllm.num_nodes": 1}
    assert found.ranks.worlds == {"actor": 1, "rollout": 3}
    assert found.ranks.used_nodes == ["n1"]


def test_engines_become_fewer_where_nothing_else_can() -> None:
    config = a_config(vllm__num_engines=3)
    ranks = placed(config, Topology.uniform(["n1", "n2"], 2))
    found = replaced(ranks, {"n2"}, Topology.uniform(["n1", "n2"], 2), config)
    assert found.words(config) == "vllm.num_engines = 1 (it was 3)"
    assert found.ranks.worlds == {"actor": 1, "rollout": 1}


def test_roles_that_share_slots_shrink_together() -> None:
    same = {f"{name}.num_{what}": 2 for name in ("actor", "critic") for what in ("nodes", "gpus_per_node")}
    config = a_config(**{**PPO, **same}, train__colocate_all=True, vllm__num_engines=4)
    ranks = placed(config, Topology.uniform(["n1", "n2"], 2))
    found = replaced(ranks, {"n1"}, Topology.uniform(["n1", "n2"], 2), config)
    assert found.change == {"actor.num_nodes": 1, "critic.num_nodes": 1, "vllm.num_engines": 2}
    assert found.ranks.worlds == {"actor": 2, "critic": 2, "rollout": 2}


def test_only_sizes_over_which_batches_divide_come_into_question() -> None:
    config = a_config(train__batch_size=12, rollout__batch_size=12, actor__num_nodes=2, actor__num_gpus_per_node=6)
    sizes = {change.get("actor.num_nodes", 2) * change.get("actor.num_gpus_per_node", 6) for change in every(config)}
    assert sizes == {12, 6, 4, 3, 2, 1}
    assert every(config)[0] == {}


def every(config: Config) -> list[dict[str, int]]:
    return list(smaller_layouts(group_sizes(config, 2)))


def test_what_is_missing_is_said() -> None:
    topology = Topology.uniform(["n1", "n2"], 6)
    ranks = placed(LARGE, topology)
    with pytest.raises(PlacementError, match=r"and no node is left\. Keep one in reserve: cluster\.spares"):
        replaced(ranks, {"n1", "n2"}, topology, LARGE)
    small = a_config()
    ranks = placed(small, Topology.uniform(["n1", "n2"], 1))
    with pytest.raises(
        PlacementError, match=r"no free node of the allocation can stand in for n2 \(0 are free\), and"
    ) as one:
        replaced(ranks, {"n2"}, topology, small)
    assert "nor does any smaller layout: the smallest that the rules of the configuration allow needs 2 slots" in str(
        one.value
    )


def test_a_smaller_layout_has_to_fit_the_memory_of_the_gpus() -> None:
    topology, asked = Topology.uniform(["n1", "n2"], 6), []
    ranks = placed(LARGE, topology)

    def fits(config: Config) -> bool:
        asked.append(config)
        return config.actor.num_nodes * config.actor.num_gpus_per_node == 4

    found = replaced(ranks, {"n2"}, topology, LARGE, fits)
    assert found.ranks.worlds["actor"] == 4
    assert asked
    with pytest.raises(PlacementError, match="those layouts that would fit need more memory than a GPU has"):
        replaced(ranks, {"n2"}, topology, LARGE, lambda config: False)
