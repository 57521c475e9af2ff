"""Whole runs by kind of algorithm and of reward: recipes, components, refilled groups, bypass, a reward model."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from patched_ranks import Call, calls, noted
from sums_task import SPREAD
from tiny_models import make_reward
from training_runs import COMMAND, finished, metrics, saved, summary, timeless, train, workspace

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SBATCH = Path(__file__).parents[2] / "sbatch"
RECIPES = sorted({path.stem for path in (SBATCH / "recipes").glob("*.toml")} - {"code_grpo", "distill", "tools_grpo"})
"""All but those with a reward, a teacher or tools of their own: test_run_environments learns by the last."""
ALIKE = {"grpo_lora"}
"""Recipes that are run elsewhere: test_run_lora has adapters."""
SMALL = (
    *("--train.max_steps=2", "--train.max_epochs=1", "--train.full_determinism=false", "--preflight=auto"),
    *("--eval.dataset=", "--logger.tensorboard=false"),
)
MORE = {"dapo": ("--reward.overlong_buffer_len=2", "--rollout.vllm_generate_batch_size=12")}
"""Options that the quickstart switches off in a recipe, because its answers are short and its batches small."""
ROLES = {"ppo": {"critic", "reference"}, "reinforce_pp": {"reference"}, "rloo": {"reference"}}
"""Roles of a recipe but the actor and the engines."""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return workspace(tmp_path_factory.mktemp("recipes"), SPREAD)


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.full] * (name in ALIKE)) for name in RECIPES])
def test_it_trains(name: str, config: Path, tmp_path: Path) -> None:
    files = [str(SBATCH / "recipes" / f"{name}.toml"), str(SBATCH / "quickstart.toml")]
    output = finished(config, tmp_path / "run", *SMALL, *MORE.get(name, ()), command=[*COMMAND, *files])
    rows = metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert row["actor_grad_norm"] > 0
        assert all(math.isfinite(value) for value in row.values())
    assert ("value_loss" in rows[0]) == (name == "ppo")
    roles = {"actor", "rollout"} | ROLES.get(name, set())
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["world"].keys() == roles
    assert {"forward", "update"} <= summary["phases"].keys()
    assert all(phase["measured"] > 0 for phase in summary["phases"].values())
    assert summary["phases"]["update"]["predicted"] > 0
    assert summary["phases"]["sync"]["predicted"] > 0
    assert "seconds of a step, predicted/measured: " in output


@pytest.mark.full  # the preset and the sandbox have tests of their own
def test_code_is_scored_in_the_sandbox(config: Path, tmp_path: Path) -> None:
    """One or two characters of a model that has learned nothing are a program now and then: some of them pass."""
    rows = [{"input": f"{n}+{n}=", "tests": [{"input": "", "output": ""}]} for n in range(64)]
    (tmp_path / "code.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = [str(SBATCH / "recipes" / "code_grpo.toml"), str(SBATCH / "quickstart.toml")]
    words = (f"--data.prompt_dataset={tmp_path / 'code.jsonl'}", "--reward.remote_url=", "--reward.workers=2")
    words += (*SMALL, "--rollout.max_new_tokens=2", "--rollout.batch_size=32", "--train.batch_size=128")
    finished(config, tmp_path / "run", *words, command=[*COMMAND, *files])
    found = metrics(tmp_path / "run")
    assert all(row["reward"] == row["accuracy"] < 1 and row.get("reward/failed", 0) == 0 for row in found)
    assert found[0]["accuracy"] > 0 < found[0]["actor_grad_norm"]
    assert (tmp_path / "run" / "report.html").is_file()


# --- run components ---------------------------------------------------------------------------------------------------


COMPONENTS = """
def reward_func(responses, labels, finish_reasons):
    assert set(finish_reasons) <= {"stop", "length", "repetition"}
    right = [float(label in response) for label, response in zip(labels, responses)]
    short = [-float(len(response)) for response in responses]
    return {"rewards": right, "components": {"right": right, "short": short}}
"""

COMPONENT_KEYS = (
    *("--algo.advantage.estimator=gdpo", "--algo.kl.init_coef=0"),
    *('--algo.advantage.gdpo_reward_keys=["short","right"]', "--algo.advantage.gdpo_reward_weights=[0.5,1.0]"),
    *("--rollout.mask_truncated", "--rollout.repetition_detection_max_pattern_size=2"),
    *("--rollout.repetition_detection_min_count=3", "--eval.dataset=", "--train.max_steps=2"),
    *("--train.batch_size=32", "--train.max_epochs=1"),
)


def test_components_ends_and_the_mask_go_through_a_run(tmp_path: Path) -> None:
    config = workspace(tmp_path, COMPONENTS)
    with noted(tmp_path / "noted") as file:
        output = finished(config, tmp_path / "run", *COMPONENT_KEYS)
    assert summary(tmp_path / "run")["world"] == {"actor": 1, "rollout": 1}
    for row in metrics(tmp_path / "run"):
        assert row["reward"] == row["reward/right"]
        assert row["reward/short"] < 0
        assert 0 <= row["repetition"] <= row["truncated"] < 1
        assert 0 < row["shaping/masked"] < 1
        assert row["ratio"] == pytest.approx(1, abs=1e-5)  # over the tokens that are left
        assert row["actor_grad_norm"] > 0
        assert 0 < row["rollout_logprob_diff"] <= row["rollout_logprob_diff_max"] < 1e-4
        assert 0 < row["correction/log_rho_max"] < 1e-4
    methods = [call.method for call in calls(file) if call.role == "actor"]
    assert methods.count("train_step") == 2
    assert methods.count("logprobs") == 1  # the self-check's
    assert 0 < summary(tmp_path / "run")["self_check"]["alone"] < 1e-5
    assert "self-check, first update: mean ratio 1" in output


# --- run dynamic sampling ---------------------------------------------------------------------------------------------


BATCH, SAMPLES = 8, 2
PARITY = """
from pathlib import Path

def reward_func(response_ids, step):
    constant = Path(__file__).with_name("constant").exists() and step > 2
    return [0.0 if constant else float(sum(tokens) % 2) for tokens in response_ids]
"""
"""About half of the groups of two have spread; in another directory none from the third step on."""

FILTERED = (
    "--algo.dynamic_filtering_enable=true",
    f"--rollout.n_samples_per_prompt={SAMPLES}",
    "--algo.advantage.estimator=rloo",
    "--algo.kl.init_coef=0",
    "--train.batch_size=16",
    "--train.max_epochs=1",
    "--train.max_steps=3",
    "--eval.dataset=",
)


def test_resumed_it_writes_the_same_metrics(tmp_path: Path) -> None:
    """The next prompts, their number in a round and their engines are as if nothing had happened."""
    config = workspace(tmp_path, PARITY)
    world = (*FILTERED, "--vllm.num_engines=2", "--ckpt.save_steps=1")
    finished(config, tmp_path / "whole", *world)
    rows = metrics(tmp_path / "whole")
    for row in rows:
        assert row["reward_constant"] == 0  # every group has spread
        assert row["dynamic_filtering/prompts"] > BATCH
        assert row["dynamic_filtering/pass_rate"] * row["dynamic_filtering/prompts"] >= BATCH - 1e-6
    # A run that was killed after its first checkpoint would go on from this one.
    first = tmp_path / "whole" / "checkpoints" / "step_000001"
    finished(config, tmp_path / "resumed", *world, f"--resume={first}")
    assert timeless(metrics(tmp_path / "resumed")) == timeless(rows[1:])
    assert len(rows) == 3


def test_engines_that_sleep_refill_awake_and_a_run_of_which_nothing_passes_saves_and_says_so(tmp_path: Path) -> None:
    config = workspace(tmp_path, PARITY)
    (tmp_path / "constant").touch()
    code, output = train(
        config,
        tmp_path / "run",
        *FILTERED,
        "--train.full_determinism=false",
        "--train.colocate_all=true",
        "--algo.dynamic_filtering_max_tries=3",
        "--rollout.vllm_generate_batch_size=12",
        warm=True,
    )
    rows = metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2], output
    for row in rows:
        assert row["reward_constant"] == 0
        assert row["dynamic_filtering/prompts"] >= BATCH
    assert code == 1
    assert "step 3: dynamic sampling kept 0 of 36 groups (0.0%)" in output
    assert "algo.dynamic_filtering_max_tries = 3" in output
    assert "Traceback" not in output
    assert summary(tmp_path / "run")["status"] == "failed"
    assert saved(tmp_path / "run") == [2]


# --- run bypass -------------------------------------------------------------------------------------------------------


BYPASS_STEPS = 24
BYPASS = (
    "--algo.correction.bypass=true",
    "--algo.advantage.estimator=group_norm",
    "--algo.kl.init_coef=0",
    "--train.max_epochs=1",
    "--train.batch_size=32",
    f"--train.max_steps={BYPASS_STEPS}",
    "--eval.dataset=",
)

SEVENS = """
def reward_func(responses):
    return [response.count("7") / 8 for response in responses]
"""


@pytest.fixture(scope="module")
def bypassed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, list[Call]]:
    path = tmp_path_factory.mktemp("bypass")
    config = workspace(path, SEVENS)
    with noted(path / "noted") as file:
        output = finished(config, path / "run", *BYPASS)
    return path / "run", output, calls(file)


def test_the_actor_passes_nothing_forward_but_for_the_self_check(bypassed: tuple[Path, str, list[Call]]) -> None:
    _, _, made = bypassed
    of_actor = [call.method for call in made if call.role == "actor" and call.method != "sync_push"]
    before = of_actor[: of_actor.index("train_step")]
    assert before.count("logprobs") == before.count("self_check") == 1
    assert of_actor.count("logprobs") == 1
    assert of_actor.count("train_step") == BYPASS_STEPS


def test_it_learns(bypassed: tuple[Path, str, list[Call]]) -> None:
    rewards = [row["reward"] for row in metrics(bypassed[0])]
    # Five seeds, two of them with the instructions of AVX2 alone, rise by 0.925 to 0.980; without learning, by 0.
    assert statistics.mean(rewards[-6:]) > statistics.mean(rewards[:6]) + 0.8


def test_the_first_update_measures_what_the_pass_would_have(bypassed: tuple[Path, str, list[Call]]) -> None:
    rows = metrics(bypassed[0])
    # A policy that has learned gives its only response a log-prob of 0 in engine and actor.
    assert rows[0]["correction/log_rho_mean"] > 0
    for row in rows:
        assert {"correction/k1", "correction/k3", "correction/chi2", "approx_kl"} <= set(row)
        assert row["correction/log_rho_mean"] < 1e-5
        assert row["correction/log_rho_mean"] <= row["correction/log_rho_max"] < 1e-4
        assert row["correction/truncated"] == row["correction/dropped"] == 0
        assert row["rollout_logprob_diff"] == pytest.approx(row["correction/log_rho_mean"], rel=1e-4)
        assert row["correction/ess"] == pytest.approx(1.0, abs=1e-6)
        assert row["first_ratio"] == pytest.approx(1.0, abs=1e-5)
        assert row["correction/not_finite"] == 0


def test_the_self_check_compares_engine_and_actor_with_bypass(bypassed: tuple[Path, str, list[Call]]) -> None:
    run_dir, _, _ = bypassed
    summary: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    assert 0 < summary["self_check"]["engine"] < 1e-5
    assert 0 < summary["self_check"]["alone"] < 1e-5


# --- run reward -------------------------------------------------------------------------------------------------------


SHARDED_STEPS, EVALUATED, LONGEST = 2, 5, 8
SHARDED = (
    *("--actor.num_gpus_per_node=2", "--ds.zero_stage=3", "--actor.gradient_checkpointing_enable"),
    *("--ref.num_gpus_per_node=2", "--ref.zero_stage=3", "--reward.num_gpus_per_node=2", "--reward.remote_url="),
    *(f"--eval.max_samples={EVALUATED}", f"--train.max_steps={SHARDED_STEPS}"),
    *("--algo.kl.use_loss=true", "--algo.kl.estimator=k3+"),
)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs")
    config = workspace(path)
    make_reward(path / "rm", hidden=128, heads=4, kv_heads=2)
    finished(config, path / "run", *SHARDED, f"--reward.model_name_or_path={path / 'rm'}")
    return path / "run"


def expected_evaluation(work: Path) -> float:
    """Mean reward of the untrained model's greedy responses, by transformers alone."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(work / "model")
    judge = AutoModelForSequenceClassification.from_pretrained(work / "rm", num_labels=1)
    tokenizer = AutoTokenizer.from_pretrained(work / "model")
    rows = [json.loads(line) for line in (work / "eval.jsonl").read_text().splitlines()[:EVALUATED]]
    scores = []
    with torch.no_grad():
        for row in rows:
            ids = tokenizer(row["input"], return_tensors="pt")["input_ids"]
            for _ in range(LONGEST):
                ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
                if int(ids[0, -1]) == tokenizer.eos_token_id:
                    break
            scores.append(float(judge(input_ids=ids).logits[0, 0]))
    return sum(scores) / len(scores)


def test_rewards_are_those_of_a_transformers_forward(sharded: Path) -> None:
    summary = json.loads((sharded / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert summary["world"] == {"actor": 2, "critic": 1, "reference": 2, "reward": 2, "rollout": 1}
    assert summary["eval_before"] == pytest.approx(expected_evaluation(sharded.parent), abs=1e-5)
    assert list((sharded / "logs").glob("reward.*.1.log"))


def test_the_critic_started_from_the_reward_model_and_said_so(sharded: Path) -> None:
    log = next((sharded / "logs").glob("conductor.*.log")).read_text()
    assert f"critic: starts from {sharded.parent / 'rm'}, a reward model, and keeps its head (score)" in log
    assert "that is not the padding token (transformers' rule for score.weight)" in log


def test_engines_and_reference_had_the_actors_weights(sharded: Path) -> None:
    rows = metrics(sharded)
    assert len(rows) == SHARDED_STEPS
    for row in rows:
        assert row["rollout_logprob_diff_max"] < 1e-5
    assert abs(rows[0]["kl"]) < 1e-5
    assert abs(rows[1]["kl"]) > 1e-4
    assert rows[1]["kl_loss"] > 0  # the KL penalty is a term of the loss, on sharded actor and reference
    assert 0 < abs(rows[0]["reward"]) < 10


def test_the_checkpoint_is_of_what_was_trained(sharded: Path) -> None:
    checkpoint = sharded / "checkpoints" / f"step_{SHARDED_STEPS:06d}"
    assert {path.name for path in checkpoint.iterdir() if path.is_dir()} == {"actor", "critic"}
