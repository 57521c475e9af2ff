"""Whole runs that train adapters: PPO with engines of two ranks, resumed; sampling ahead; the actor's ranks sample."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file
from sums_task import SPREAD
from training_runs import finished, metrics, summary, timeless, workspace

pytestmark = [pytest.mark.engine, pytest.mark.slow]

LORA = ("--lora.rank=4", "--lora.alpha=8", "--actor.learning_rate=0.01", "--eval.dataset=")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return workspace(tmp_path_factory.mktemp("lora"), SPREAD)


def test_ppo_with_engines_of_two_ranks_goes_on_bit_for_bit(config: Path, tmp_path: Path) -> None:
    words = (*LORA, "--vllm.tensor_parallel_size=2", "--algo.kl.init_coef=0.05", "--actor.num_gpus_per_node=2")
    words += ("--ds.zero_stage=2", "--ckpt.save_steps=2", "--train.full_determinism=true")
    finished(config, tmp_path / "whole", *words, "--train.max_steps=4")
    assert summary(tmp_path / "whole")["world"].keys() == {"actor", "critic", "rollout"}  # no reference
    rows = metrics(tmp_path / "whole")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert abs(rows[0]["kl"]) < 1e-5
    assert rows[-1]["kl"] > 1e-3
    for row in rows:
        assert row["rollout_logprob_diff_max"] < 1e-4  # in fp32, of the same adapters, after updates too
        assert row["actor_grad_norm"] > 0
        assert row["value_loss"] > 0
    adapter = load_file(tmp_path / "whole" / "final" / "adapter" / "adapter_model.safetensors")
    sent = sum(tensor.nbytes for tensor in adapter.values())
    assert rows[-1]["perf/sync_bytes"] == sent

    half = tmp_path / "whole" / "checkpoints" / "step_000002"
    finished(config, tmp_path / "again", *words, f"--resume={half}", "--train.max_steps=4")
    assert timeless(metrics(tmp_path / "again")) == timeless(rows[2:])


def test_a_response_is_of_one_policy_where_engines_sample_ahead(config: Path, tmp_path: Path) -> None:
    words = (*LORA, "--vllm.sync_mode=inflight", "--train.async_queue_size=2", "--train.staleness_threshold=2")
    words += ("--algo.advantage.estimator=group_norm", "--algo.kl.init_coef=0", "--train.full_determinism=false")
    finished(config, tmp_path / "run", *words, "--train.max_steps=4")
    rows = metrics(tmp_path / "run")
    for row in rows:
        assert row["mixed_responses"] == 0
        assert row["staleness_max"] <= 2
    assert any(row["stale_tokens"] > 0 for row in rows)


def test_the_actors_ranks_sample_with_their_adapters(config: Path, tmp_path: Path) -> None:
    words = (*LORA, "--rollout.engine=hf", "--actor.num_gpus_per_node=2", "--ds.zero_stage=3")
    words += ("--algo.advantage.estimator=group_norm", "--algo.kl.init_coef=0.05")
    finished(config, tmp_path / "run", *words, "--train.max_steps=3")
    assert summary(tmp_path / "run")["world"] == {"actor": 2}
    rows = metrics(tmp_path / "run")
    assert all(row["rollout_logprob_diff_max"] < 1e-4 for row in rows)
    assert rows[-1]["kl"] > 1e-3
