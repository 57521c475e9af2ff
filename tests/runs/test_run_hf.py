"""Runs in which the actor's ranks sample (rollout.engine = hf): one that goes on as it was, one that is stopped."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
from sums_task import SPREAD
from training_runs import finished, metrics, started, summary, timeless, workspace
from waiting import scaled

pytestmark = [pytest.mark.slow]

KEYS = (
    *("--rollout.engine=hf", "--rollout.hf_gather=layer", "--rollout.hf_max_num_seqs=6"),
    *("--actor.num_gpus_per_node=2", "--ds.zero_stage=3", f"--timeout.heartbeat={round(scaled(8))}"),
    *("--eval.steps=2", "--ckpt.save_steps=2", "--algo.advantage.estimator=group_norm", "--algo.kl.init_coef=0"),
)


def test_the_actor_samples_a_run_resumes_bit_for_bit_and_a_rank_that_stands_still_is_named(tmp_path: Path) -> None:
    config = workspace(tmp_path, SPREAD)
    output = finished(config, tmp_path / "whole", *KEYS, "--train.max_steps=3")
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
    assert code == 1
    assert re.search(rf"role actor died: rank \d on \S+ \(pid {worker}\) is lost: .*not heard from", output)
    assert "Traceback" not in output
