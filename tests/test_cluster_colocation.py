"""`train.colocate_...`: which roles share their slots."""

from __future__ import annotations

import pytest

from slurm_rlhf.cli.layout import layout_here
from slurm_rlhf.cluster.draw import draw
from slurm_rlhf.cluster.sizes import colocations
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import PlacementError

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
    with pytest.raises(PlacementError, match=r"fits: critic\.num_gpus_per_node = 1, reward\.num_gpus_per_node = 1"):
        layout_here(config, JOB)
    config.train.colocate_critic_reward = True
    layout = layout_here(config, JOB)
    assert layout.worlds == {"actor": 1, "critic": 2, "reward": 2, "rollout": 1}
    assert layout.roles["critic"][0].gpus == layout.roles["reward"][0].gpus == (1, 2)
    assert "C0+W0" in draw(layout)
    config.reward.num_gpus_per_node = 1
    with pytest.raises(PlacementError, match=r"critic and reward are colocated.*reward\.num_gpus_per_node = 1"):
        layout_here(config, JOB)
