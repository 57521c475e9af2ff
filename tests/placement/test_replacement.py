"""Nodes that take over, engines that move, and roles that share slots."""

from __future__ import annotations

import pytest

from slurm_rlhf.cli.plan import draw_layout, layout_here, layout_on
from slurm_rlhf.config.keys import changed
from slurm_rlhf.config.roles import colocations
from slurm_rlhf.config.rules import rule_problems
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import PlacementError
from slurm_rlhf.nodes.environment import visible_gpus
from slurm_rlhf.placement.rank_map import RankMap, draw, place, process_slots
from slurm_rlhf.placement.replacement import group_sizes, replaced, smaller_layouts, with_engine_on
from slurm_rlhf.placement.topology import CPU, Node, RoleSize, Topology, role_sizes

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
    assert list(smaller_layouts([[(1, {})], []])) == []  # no size of the second group is allowed


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

    assert replaced(ranks, {"n2"}, topology, LARGE, fits).ranks.worlds["actor"] == 4
    assert asked
    with pytest.raises(PlacementError, match="those layouts that would fit need more memory than a GPU has"):
        replaced(ranks, {"n2"}, topology, LARGE, lambda config: False)


# --- moved engine -----------------------------------------------------------------------------------------------------


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


# --- colocation -------------------------------------------------------------------------------------------------------


EVERYBODY = frozenset({"actor", "critic", "reference", "reward", "rollout"})
JOB = {
    **{"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n1", "SLURM_JOB_NUM_NODES": "1"},
    **{"SLURM_GPUS_ON_NODE": "4", "SLURMD_NODENAME": "n1"},
}


def test_actor_and_reference_on_the_same_gpus() -> None:
    config = Config()
    assert colocations(config) == []
    config.actor.num_gpus_per_node = config.ref.num_gpus_per_node = 2
    with pytest.raises(PlacementError, match="they need 6 GPUs"):
        layout_here(config, JOB)
    config.train.colocate_actor_ref = True
    roles = layout_here(config, JOB).roles
    assert roles["actor"][0].gpus == roles["reference"][0].gpus == (0, 1)


def test_a_reward_function_has_no_slots_to_share() -> None:
    config = Config()
    config.train.colocate_critic_reward = True
    assert colocations(config) == [frozenset({"critic", "reward"})]
    assert layout_here(config, JOB).worlds == {"actor": 1, "critic": 1, "reference": 1, "rollout": 1}


def test_critic_and_reward_model_on_the_same_gpus() -> None:
    config = Config()
    config.critic.num_gpus_per_node = config.reward.num_gpus_per_node = 2
    config.reward.model_name_or_path = "/models/reward"
    with pytest.raises(PlacementError, match="they need 7 GPUs"):
        layout_here(config, JOB)
    config.algo.kl.init_coef = 0.0
    with pytest.raises(PlacementError, match=r"they need 6 GPUs(.|\n)*run on 2 nodes of 4 GPUs"):
        layout_here(config, JOB)
    config.train.colocate_critic_reward = True
    layout = layout_here(config, JOB)
    assert layout.worlds == {"actor": 1, "critic": 2, "reward": 2, "rollout": 1}
    assert layout.roles["critic"][0].gpus == layout.roles["reward"][0].gpus == (1, 2)
    assert "C0+W0" in draw(layout)
    config.reward.num_gpus_per_node = 1
    with pytest.raises(
        PlacementError, match=r"critic and reward are colocated, so they must.*reward\.num_gpus_per_node = 1"
    ):
        layout_here(config, JOB)


def all_in_one(nodes: int, gpus: int, tp: int) -> Config:
    config = Config()
    config.train.colocate_all = True
    config.reward.model_name_or_path = "/models/reward"
    for group in (config.actor, config.critic, config.ref, config.reward):
        group.num_nodes, group.num_gpus_per_node = nodes, gpus
    config.vllm.num_engines, config.vllm.tensor_parallel_size = nodes * gpus // tp, tp
    return config


def test_all_roles_on_the_same_gpus() -> None:
    config = all_in_one(1, 4, 2)
    assert colocations(config) == [EVERYBODY]
    layout = layout_here(config, JOB)
    assert {role: shares[0].gpus for role, shares in layout.roles.items()} == dict.fromkeys(EVERYBODY, (0, 1, 2, 3))
    assert [group.gpus for group in layout.tp_groups] == [(0, 1), (2, 3)]
    drawn = draw(layout).splitlines()
    assert drawn[1].split() == ["n1", *(f"A{i}+C{i}+R{i}+W{i}+E{i // 2}.{i % 2}" for i in range(4))]
    assert drawn[-1] == "4 of 4 GPUs used"
    # Both torchruns of a role on a node see the same devices.
    shown = [visible_gpus(layout.topology, "n1", layout.roles[role][0].gpus, {}) for role in ("actor", "rollout")]
    assert shown[0] == shown[1] == {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    config.train.colocate_actor_ref = True  # says nothing new
    assert layout_here(config, JOB) == layout


def test_all_roles_on_several_nodes() -> None:
    layout = layout_on(all_in_one(2, 8, 4), ["n1", "n2"], (8, 8))
    for shares in layout.roles.values():
        assert [(share.node, share.gpus) for share in shares] == [("n1", tuple(range(8))), ("n2", tuple(range(8)))]
    assert [(group.node, group.gpus[0]) for group in layout.tp_groups] == [("n1", 0), ("n1", 4), ("n2", 0), ("n2", 4)]


def test_without_gpus_colocated_roles_share_their_process_slots() -> None:
    layout = layout_here(all_in_one(1, 2, 1), {"CUDA_VISIBLE_DEVICES": ""})
    assert layout.topology.slots == 2
    assert draw(layout).splitlines()[-1] == "2 of 2 process slots used"
    imagined = draw_layout(all_in_one(2, 2, 2), {})
    assert "A2+C2+R2+W2+E1.0" in imagined
    assert "4 of 4 process slots used" in imagined


def test_engines_that_do_not_cover_the_actors_slots() -> None:
    config = all_in_one(1, 4, 1)
    config.vllm.num_engines = 3
    with pytest.raises(PlacementError, match=r"vllm\.num_engines = 3.* Make them equal"):
        layout_here(config, JOB)
