"""`train.colocate_...`: which roles share their slots."""

from __future__ import annotations

import pytest

from slurm_rlhf.cli.plan import draw_layout, layout_here, layout_on
from slurm_rlhf.config.roles import colocations
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import PlacementError
from slurm_rlhf.nodes.environment import visible_gpus
from slurm_rlhf.placement.rank_map import draw

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
    config.ref.num_gpus_per_node = 1
    with pytest.raises(PlacementError, match="actor and reference are colocated, so they must have the same slots"):
        layout_here(config, JOB)


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
    with pytest.raises(PlacementError, match=r"critic and reward are colocated.*reward\.num_gpus_per_node = 1"):
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
    assert shown[0] == shown[1] == dict.fromkeys(("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"), "0,1,2,3")
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
