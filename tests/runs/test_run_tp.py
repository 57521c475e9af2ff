"""A whole run with engines of two ranks: one that comes late, and one that loses a rank and starts again."""

from __future__ import annotations

import os
import re
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from holds import Holds
from patched_ranks import patched
from sums_task import PACE
from training_runs import Run, metrics, workspace

pytestmark = [pytest.mark.engine, pytest.mark.slow]

TP = (
    *("--vllm.tensor_parallel_size=2", "--algo.advantage.estimator=group_norm", "--algo.kl.init_coef=0"),
    *("--eval.dataset=", "--train.num_episodes=1000", "--train.max_steps=100000"),
)
LATE = """
import os, sys, time

if "--role=rollout" in sys.orig_argv and os.environ.get("LOCAL_RANK") in ("2", "3"):
    while not os.path.exists(os.environ["TEST_HOLD"]):
        time.sleep(0.1)
"""
"""Runs in every process before anything else: ranks 2 and 3, engine 1, start when the file is there."""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = workspace(tmp_path_factory.mktemp("runs"))
    Holds(file).hold(PACE, "0.1")  # runs without an end leave the cores to what is tested
    return file


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A directory for temporary files, with a short path: sockets are made there."""
    with tempfile.TemporaryDirectory(prefix="t") as made:
        yield Path(made)


@pytest.fixture(scope="module")
def late(config: Path, place: Path) -> Iterator[Run]:
    """A run of two engines, of which the second starts when `engine_1` exists."""
    with patched(config.parent / "site", LATE, TEST_HOLD=str(config.parent / "engine_1"), TMPDIR=str(place)):
        words = (*TP, "--vllm.num_engines=2", "--train.full_determinism=false")
        run = Run(config, config.parent / "late", *words)
    yield run
    run.end()


def test_the_late_engine_joins_with_the_current_weights(config: Path, late: Run) -> None:
    late.wait_for_step(1)
    assert "engine 0 takes part" in late.log()
    assert "engine 1 takes part" not in late.log()
    (config.parent / "engine_1").touch()
    late.wait_for_log("engine 1 takes part")
    late.wait_for_step(len(metrics(late.run_dir)) + 2)
    rows = metrics(late.run_dir)
    assert max(row["rollout_logprob_diff_max"] for row in rows) < 1e-5


def test_a_rank_that_is_killed_is_named_and_its_whole_engine_comes_back(late: Run, place: Path) -> None:
    before = {pid for pid in late.ranks("rollout") if _rank(pid) in ("2", "3")}
    [follower] = [pid for pid in before if _rank(pid) == "3"]
    # The queues between the ranks have no name by now, so that a killed rank leaves nothing in /dev/shm.
    maps = "".join(Path(f"/proc/{pid}/maps").read_text() for pid in late.ranks("rollout"))
    assert set(re.findall(r"/dev/shm/psm_\w+(.*)", maps)) == {" (deleted)"}
    os.kill(follower, signal.SIGKILL)
    late.wait_for_log("1 of 2 engines go on")
    assert re.search(rf"engine 1 on \S+ is lost: rank 3 .*\(pid {follower}\) was killed by SIGKILL\.", late.log())
    late.wait_for_step(len(metrics(late.run_dir)) + 1)
    late.wait_for_log("takes part again")
    after = {pid for pid in late.ranks("rollout") if _rank(pid) in ("2", "3")}
    assert len(after) == 2
    assert not after & before
    late.wait_for_step(len(metrics(late.run_dir)) + 2)
    assert max(row["rollout_logprob_diff_max"] for row in metrics(late.run_dir)) < 1e-5
    late.process.send_signal(signal.SIGINT)
    code, output = late.wait()
    assert code == 130, output
    assert "Traceback" not in output
    root = place / f"slurm_rlhf.{os.getuid()}"
    assert set(place.rglob("*")) == {root, root / ".lock"}


def _rank(pid: int) -> str:
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return next((v.partition(b"=")[2].decode() for v in variables if v.startswith(b"LOCAL_RANK=")), "")
