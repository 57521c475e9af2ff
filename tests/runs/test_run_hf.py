"""Runs in which the actor's ranks sample (rollout.engine = hf): one that goes on as it was, one that is stopped."""

from __future__ import annotations

import hashlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from training_runs import COMMAND, metrics, started, summary, timeless, train, workspace
from waiting import HANG_S, scaled

pytestmark = [pytest.mark.slow]

KEYS = (
    *("--rollout.engine=hf", "--rollout.hf_gather=layer", "--rollout.hf_max_num_seqs=6"),
    *("--actor.num_gpus_per_node=2", "--ds.zero_stage=3", f"--timeout.heartbeat={round(scaled(8))}"),
    *("--eval.steps=2", "--ckpt.save_steps=2", "--algo.advantage.estimator=group_norm", "--algo.kl.init_coef=0"),
)
# The responses to a prompt nearly always differ in it: every step has a gradient.
REWARD = """
def reward_func(queries, prompts, labels, **kwargs):
    return [sum(map(ord, response)) % 7 / 7 for response in kwargs["responses"]]
"""
SBATCH = Path(__file__).parents[2] / "sbatch"


def test_the_actor_samples_a_run_resumes_bit_for_bit_and_a_rank_that_stands_still_is_named(tmp_path: Path) -> None:
    config = workspace(tmp_path, REWARD)
    code, output = train(config, tmp_path / "whole", *KEYS, "--train.max_steps=3", warm=True)
    assert code == 0, output
    assert "actor: samples with transformers" in output
    assert "layer by layer, for each token" in output
    assert "warning: rollout.engine = hf: the actor's ranks sample, so vllm.max_num_seqs have no effect" in output
    assert summary(tmp_path / "whole")["world"] == {"actor": 2}
    rows = metrics(tmp_path / "whole")
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert row["rollout_logprob_diff_max"] < 1e-4  # in fp32, of the same weights, after updates too
        assert row["first_ratio"] == pytest.approx(1, abs=1e-5)
        assert row["actor_grad_norm"] > 0
        assert sum(row[f"perf/engine/{rank}/responses"] for rank in (0, 1)) == 32
        assert "time/sync" not in row
        assert not any(name.startswith("perf/sync") for name in row)
    assert "eval" in rows[1]
    assert (tmp_path / "whole" / "final" / "model.safetensors").is_file()

    checkpoint = tmp_path / "whole" / "checkpoints" / "step_000002"
    endless = ("--train.max_steps=1000", "--train.num_episodes=1000", "--train.max_restarts=0")
    with started(config, tmp_path / "again", *KEYS, *endless, f"--resume={checkpoint}", warm=True) as run:
        run.wait_for_step(1)
        last = {
            name: value for name, value in rows[2].items() if not name.startswith("eval")
        }  # here it is not the last
        assert timeless(metrics(tmp_path / "again")[:1]) == timeless([last])
        worker = run.workers("actor")[0]
        os.kill(worker, signal.SIGSTOP)
        code, output = run.wait()
        run.assert_gone()
    assert code == 1
    assert re.search(rf"role actor died: rank \d on \S+ \(pid {worker}\) is lost: .*not heard from", output)
    assert "Traceback" not in output


@pytest.mark.full
@pytest.mark.timeout(1500)
def test_the_quickstart_learns_with_it_under_every_stage(tmp_path: Path) -> None:
    """Ten steps each: a policy that can nearly add gets better, as it does with vLLM."""
    data = quickstart_input(tmp_path / "input")
    prompts = keys(data, model="model", prompt_dataset="data.train.jsonl", dataset="eval.eval.jsonl")
    for stage in (0, 1, 2, 3):
        run_dir, more = tmp_path / f"zero{stage}", (f"--ds.zero_stage={stage}", "--train.max_steps=10")
        code, output = train(SBATCH / "quickstart.toml", run_dir, *prompts, "--rollout.engine=hf", *more)
        assert code == 0, output
        rewards = [row["reward"] for row in metrics(run_dir)]
        print(f"ZeRO-{stage}: " + " ".join(f"{reward:.3f}" for reward in rewards))
        assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.1


def quickstart_input(data: Path) -> Path:
    """What the quickstart makes before it trains: that of this checkout, if it was made, or else in `data`."""
    sources = [(SBATCH / name).read_bytes() for name in ("quickstart_data.py", "quickstart_sft.toml")]
    made = SBATCH.parent / "runs" / "quickstart_input"
    recipe = made / "recipe"
    if recipe.is_file() and recipe.read_text().strip() == hashlib.sha256(b"".join(sources)).hexdigest():
        return made
    data.mkdir()
    subprocess.run([sys.executable, SBATCH / "quickstart_data.py", data], check=True, timeout=HANG_S)
    examples = [*keys(data, model="untrained", dataset="sft.sft.jsonl"), f"--sft.output_dir={data / 'model'}"]
    subprocess.run([*COMMAND[:-1], "sft", SBATCH / "quickstart_sft.toml", *examples], check=True, timeout=HANG_S)
    return data


def keys(data: Path, model: str, **files: str) -> list[str]:
    """The quickstart's files in another place: key -> group and name of the file there."""
    named = [(group, key, name) for key, file in files.items() for group, _, name in [file.partition(".")]]
    paths = [f"--{group}.{key}={data / name}" for group, key, name in named]
    return [f"--actor.model_name_or_path={data / model}", *paths]
