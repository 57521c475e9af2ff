"""Reference and reward model, whole and cut by ZeRO-3, against a plain transformers forward.

Run as a program, this file is the rank that torchrun starts.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import make_reward, make_tiny
from training_ranks import as_rank, make_config, make_experience, share, torchrun
from waiting import scaled

from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import ModelError
from slurm_rlhf.records import Experience

pytestmark = pytest.mark.slow
COLLECTIVE_S = scaled(2.0)

CASES = [("fp32", False), ("fp32", True), ("bf16", False)]  # precision, offload
RANKS = 3


def config_of(models: Path, param_dtype: str, zero_stage: int = 0, offload: bool = False) -> Config:
    config = make_config(models / "policy", param_dtype=param_dtype)
    config.reward.model_name_or_path = str(models / "score")
    for group in (config.ref, config.reward):
        group.zero_stage, group.offload = zero_stage, offload
    return config


def experience() -> Experience:
    return make_experience(0, 12)


# --- what each rank does ---------------------------------------------------------------------------------------------


def main(request: dict[str, Any]) -> None:
    models, out = Path(request["models"]), Path(request["out"])
    from slurm_rlhf.trainer.distributed import join_world
    from slurm_rlhf.trainer.frozen import FrozenPolicy, RewardModel

    world = join_world(60.0, 60.0)
    answers: dict[str, Any] = {}
    # Uneven rows a rank, so that log-probs take another number of chunks on each.
    part, micro = share(experience(), world.rank, world.size, 30)
    for param_dtype, offload in CASES:
        config = config_of(models, param_dtype, 3, offload)
        name = f"{param_dtype}.{offload}"
        answers[f"ref.{name}"] = torch.tensor(FrozenPolicy(config).logprobs(part, micro)["logprobs"])
        answers[f"reward.{name}"] = torch.tensor(RewardModel(config).score(part, micro))
    save_file(answers, out / f"rank{world.rank}.safetensors")
    check_loading(config_of(models, "bf16"), world)
    stall(config_of(models, "fp32", 3), world, out)


def check_loading(config: Config, world: Any) -> None:
    """A model to train is cut before any rank has it whole, and the rest of it is as it would have been."""
    from slurm_rlhf.trainer.backends import loading
    from slurm_rlhf.trainer.models import load_critic, load_policy

    config.ds.zero_stage = 3
    path = config.actor.model_name_or_path
    plain = load_policy(path, config.ds, 100)
    with loading(config.ds, world) as ds:
        policy, critic = load_policy(path, ds, 100), load_critic(path, ds, 0)
    for parameter in [*policy.parameters(), *critic.model.parameters()]:
        assert parameter.numel() == 0
        assert parameter.ds_tensor.numel() == -(-parameter.ds_numel // world.size)
    buffers = dict(policy.named_buffers())
    for name, buffer in plain.named_buffers():
        assert buffers[name].dtype == torch.float32
        assert torch.equal(buffers[name], buffer), name


def stall(config: Config, world: Any, out: Path) -> None:
    """One rank does not take part in a forward. Rank 0 writes down how that ended."""
    from slurm_rlhf.trainer.frozen import FrozenPolicy

    config.timeout.collective = COLLECTIVE_S
    policy = FrozenPolicy(config)
    part, micro = share(experience(), world.rank, world.size, 30)
    policy.logprobs(part, micro)
    if world.rank == 1:
        time.sleep(3 * COLLECTIVE_S)
        os._exit(0)
    with pytest.raises(RuntimeError) as caught:
        policy.logprobs(part, micro)
    if world.rank == 0:
        (out / "stall.json").write_text(json.dumps(str(caught.value)))
    else:
        time.sleep(COLLECTIVE_S)  # a peer that leaves first would be the reason
    os._exit(0)  # at exit, what is left of the group would be waited for


# --- the tests -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    make_tiny(path / "policy", tied=True)
    make_reward(path / "score")
    return path


@pytest.fixture(scope="module")
def sharded(models: Path) -> list[dict[str, torch.Tensor]]:
    torchrun(RANKS, program=__file__, models=str(models), out=str(models))
    return [load_file(models / f"rank{rank}.safetensors") for rank in range(RANKS)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-offload-{case[1]}")
def test_zero3_gives_what_a_whole_model_gives(
    models: Path, sharded: list[dict[str, torch.Tensor]], case: tuple[str, bool]
) -> None:
    from slurm_rlhf.trainer.frozen import FrozenPolicy, RewardModel

    config = config_of(models, case[0])
    for rank, answers in enumerate(sharded):
        part, micro = share(experience(), rank, RANKS, 30)
        logprobs = torch.tensor(FrozenPolicy(config).logprobs(part, micro)["logprobs"])
        scores = torch.tensor(RewardModel(config).score(part, micro))
        torch.testing.assert_close(answers[f"ref.{case[0]}.{case[1]}"], logprobs, rtol=0, atol=1e-6)
        torch.testing.assert_close(answers[f"reward.{case[0]}.{case[1]}"], scores, rtol=0, atol=1e-6)


def test_a_rank_that_takes_no_part_in_a_sharded_forward_is_noticed(
    models: Path, sharded: list[dict[str, torch.Tensor]]
) -> None:
    assert "timed out" in json.loads((models / "stall.json").read_text()).lower()  # before the other rank left


def test_what_is_no_reward_model_is_refused(models: Path, tmp_path: Path) -> None:
    from slurm_rlhf.config.schema import Ds
    from slurm_rlhf.trainer.models import load_reward

    with pytest.raises(ModelError, match=r"score\.weight, value_head\.weight, v_head\.summary\.weight; none of them"):
        load_reward(models / "policy", Ds())
    path = make_reward(tmp_path / "labels")
    weights = load_file(path / "model.safetensors")
    weights["score.weight"] = weights["score.weight"].repeat(3, 1)
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"score\.weight has shape \[3, 64\], not \[1, 64\].*num_labels = 1"):
        load_reward(path, Ds())


if __name__ == "__main__":
    as_rank(main)
