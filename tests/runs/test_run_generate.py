"""`slurm-rlhf generate` on one machine with real engines: killed and started again, it writes every row once."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from generation_runs import BAD, COMMAND, SAMPLES, answers, assert_whole, generation_workspace, lines_of, written
from small_disk import small_disk
from training_runs import Run, finished, started, summary, train, workspace
from waiting import until

pytestmark = [pytest.mark.engine, pytest.mark.slow]

ROWS = 160
TWO = "--generate.engines_per_node=2"


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return generation_workspace(tmp_path_factory.mktemp("generation"), ROWS)


@pytest.fixture(scope="module")
def calm(config: Path) -> Path:
    """The directory of a job that was left alone, on one engine."""
    run_dir = config.parent / "calm"
    finished(config, run_dir, "--generate.ordered=true", "--generate.logprobs=true", command=COMMAND)
    return run_dir


def generate(config: Path, run_dir: Path, *overrides: str) -> tuple[int, str]:
    return train(config, run_dir, *overrides, command=COMMAND, warm=True)


def test_left_alone_it_answers_every_row_and_tells_of_bad_ones(calm: Path) -> None:
    assert_whole(calm / "output.jsonl", ROWS)
    found = lines_of(calm / "output.jsonl")
    bad = {line["row"]: line["error"] for line in found if "error" in line}
    assert sorted(bad) == sorted(BAD)
    assert "longer than 40 tokens" in bad[59]
    for line in found:
        if "error" not in line:
            assert line["finish_reason"] in ("stop", "length")
            assert line["score"] == len(line["response"])
            assert 0 < line["tokens"] <= 24
            assert line["prompt_tokens"] == len(line["prompt"])
            assert len(line["token_ids"]) == len(line["logprobs"]) == line["tokens"]
            assert all(-50 < logprob <= 0 for logprob in line["logprobs"])
    assert len({line["seed"] for line in found if line["seed"] is not None}) == (ROWS - len(BAD)) * SAMPLES
    stated = summary(calm)
    assert (stated["status"], stated["responses"], stated["errors"]) == ("finished", ROWS * SAMPLES, len(BAD) * SAMPLES)
    assert stated["engines"][0]["tokens"] == stated["tokens"] == sum(line["tokens"] or 0 for line in found)
    ordered = [(line["row"], line["sample"]) for line in lines_of(calm / "merged.jsonl")]
    assert ordered == [(row, sample) for row in range(ROWS) for sample in range(SAMPLES)]


def kill_at_random_moments(config: Path, run_dir: Path, kills: int, seed: int) -> list[int]:
    """Start a job and kill it, again and again, and let the last start finish; lines after each kill.

    Half of the moments are some time after the start, so that they hit imports and the start of engines, and no later
    than the first line more; the others come soon after some lines more have been written.
    """
    rng, after = random.Random(seed), []
    output = run_dir / "output.jsonl"
    for kill in range(kills):
        before = written(output)
        with started(config, run_dir, TWO, command=COMMAND, warm=True) as job:
            if kill % 2:
                wanted = before + rng.randrange(1, max(2, 2 * SAMPLES * ROWS // kills))
                wait_for_lines(job, output, wanted)
                time.sleep(rng.random() * 0.05)
            else:
                moment = time.monotonic() + rng.random() * 5
                while time.monotonic() < moment and written(output) == before:
                    time.sleep(0.005)
            if job.process.poll() is None:
                os.kill(job.process.pid, signal.SIGKILL)
                job.assert_gone()
        after.append(written(output))
    finished(config, run_dir, TWO, command=COMMAND)
    return after


def wait_for_lines(job: Run, output: Path, count: int) -> None:
    until(lambda: written(output) >= count or job.process.poll() is not None, f"line {count}", 0.005)


@pytest.mark.parametrize("kills", [2, pytest.param(4, marks=pytest.mark.full)])
def test_killed_again_and_again_it_writes_what_one_that_was_left_alone_does(
    config: Path, calm: Path, tmp_path: Path, kills: int
) -> None:
    after = kill_at_random_moments(config, tmp_path / "job", kills, seed=1)
    assert after == sorted(after)
    assert 0 < after[-1] < ROWS * SAMPLES
    assert_whole(tmp_path / "job" / "output.jsonl", ROWS)
    assert answers(tmp_path / "job" / "output.jsonl") == answers(calm / "output.jsonl")


@pytest.fixture
def full_soon(tmp_path: Path) -> Iterator[Path]:
    """A file system of a few MiB."""
    with small_disk(tmp_path / "small", "4m") as disk:
        yield disk


def test_a_full_disk_and_dead_engines_cost_no_row(config: Path, calm: Path, full_soon: Path) -> None:
    """The same job is started three times, and each time something else happens to it while it writes."""
    run_dir = full_soon / "job"
    output, ballast = run_dir / "output.jsonl", full_soon / "ballast"
    with started(config, run_dir, TWO, command=COMMAND, warm=True) as job:
        wait_for_lines(job, output, len(BAD) * SAMPLES + 10)
        with contextlib.suppress(OSError), open(ballast, "wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        code, said = job.wait()
    assert code == 2, said
    assert re.search(rf"No space left on device: the file system {full_soon} \(tmpfs\) has 0.0 MiB free", said)
    assert "Traceback" not in said
    assert json.loads((run_dir / "summary.json").read_text())["status"] == "failed"
    kept = output.read_bytes()
    assert kept.endswith(b"\n")
    ballast.unlink()

    with started(config, run_dir, TWO, command=COMMAND, warm=True) as job:
        wait_for_lines(job, output, kept.count(b"\n") + 10)
        for rank in job.ranks("rollout"):
            os.kill(rank, signal.SIGKILL)
        code, said = job.wait()
    assert code == 1
    assert "Traceback" not in said
    last = r"error: no engine is left; the last one: rank \d of engine \d on \S+ \(pid \d+\) was killed by SIGKILL"
    assert re.search(last, said)
    assert "the same command goes on from there" in said
    assert output.read_bytes().startswith(kept)
    kept = output.read_bytes()

    with started(config, run_dir, TWO, command=COMMAND, warm=True) as job:
        wait_for_lines(job, output, kept.count(b"\n") + 10)
        os.kill(job.ranks("rollout")[0], signal.SIGKILL)
        code, said = job.wait()
    assert code == 0, said
    assert "1 of 2 engines are left" in said
    assert sorted("SIGKILL" in engine["lost"] for engine in summary(run_dir)["engines"]) == [False, True]
    assert output.read_bytes().startswith(kept)
    assert_whole(output, ROWS)
    assert answers(output) == answers(calm / "output.jsonl")


def test_another_model_or_sampling_is_refused_and_nothing_is_overwritten(config: Path, calm: Path) -> None:
    kept = (calm / "output.jsonl").read_bytes()
    code, said = generate(config, calm, "--rollout.temperature=0.5", "--train.seed=1")
    assert code == 2
    assert "rollout.temperature: 1.0 there, 0.5 here" in said
    assert "train.seed: 42 there, 1 here" in said
    code, said = generate(config, calm, "--generate.ordered=true", "--generate.logprobs=true")
    assert code == 0
    assert f"{ROWS * SAMPLES} are there from before" in said
    assert "starting" not in said  # nothing is left to do, so no engine is needed
    assert (calm / "output.jsonl").read_bytes() == kept


def test_engines_that_cannot_start_end_the_job_with_their_reason(config: Path, tmp_path: Path) -> None:
    code, said = generate(config, tmp_path / "job", TWO, "--vllm.cpu_kvcache_gib=0.0000001")
    assert code == 2, said
    assert "Traceback" not in said
    assert re.search(r"engine \d on \S+ is lost: it did not start: .*memory for the cache blocks", said), said


@pytest.mark.full  # tests/trainer/test_export makes a model of a checkpoint
def test_what_a_training_run_has_left_answers_as_its_checkpoint_does(config: Path, tmp_path: Path) -> None:
    """A run of one step has a final model and a checkpoint, which is made into a model without its ranks."""
    trained = workspace(tmp_path)
    run_dir = tmp_path / "run"
    small = ("--algo.kl.init_coef=0", "--eval.dataset=", "--train.max_steps=1", "--algo.advantage.estimator=reinforce")
    finished(trained, run_dir, *small)
    (checkpoint,) = (run_dir / "checkpoints").glob("step_*")
    rows = ("--generate.max_samples=20", "--rollout.temperature=0")
    for source, name in ((run_dir, "of_run"), (checkpoint, "of_checkpoint")):
        said = finished(config, tmp_path / name, *rows, f"--generate.model_name_or_path={source}", command=COMMAND)
    assert f"making a model from {checkpoint}" in said
    assert_whole(tmp_path / "of_run" / "output.jsonl", 20)
    answered = answers(tmp_path / "of_run" / "output.jsonl")
    assert answered == answers(tmp_path / "of_checkpoint" / "output.jsonl")
    assert all(answered[row, 0][0] == answered[row, 1][0] for row in range(20))  # greedy
