"""Files that a run leaves behind: metrics.jsonl, TensorBoard events, summary.json."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import completed
from waiting import HANG_S

from slurm_rlhf.observe.log_tail import FailedProcess, first_failure
from slurm_rlhf.observe.run_log import truncate_after, whole_lines
from slurm_rlhf.observe.run_status import Summary, TensorBoardEvents, append_metrics
from slurm_rlhf.observe.timing import Phases


def test_a_line_has_the_step_first_and_timings_last(tmp_path):
    path = tmp_path / "metrics.jsonl"
    append_metrics(path, 1, {"time/update": 0.5, "reward": 0.1 + 0.2, "perf/tokens_per_s": 9.0, "kl": 0.0, "n": 3})
    append_metrics(path, 2, {"kl": -0.0, "perf/tokens_per_s": 9.0, "reward": 1e-45, "n": 4, "time/update": 1e22})
    text = (tmp_path / "metrics.jsonl").read_text()
    assert text == (
        '{"step": 1, "kl": 0.0, "n": 3, "reward": 0.30000000000000004, "perf/tokens_per_s": 9.0, "time/update": 0.5}\n'
        '{"step": 2, "kl": -0.0, "n": 4, "reward": 1e-45, "perf/tokens_per_s": 9.0, "time/update": 1e+22}\n'
    )


@settings(deadline=None)
@given(value=st.floats(allow_nan=False, allow_infinity=False))
def test_floats_come_back_bit_for_bit(value, tmp_path_factory):
    path = tmp_path_factory.mktemp("log") / "metrics.jsonl"
    append_metrics(path, 1, {"x": value, "f32": np.float32(value) if abs(value) < 1e38 else 0.0})
    ((_, row),) = whole_lines(path.read_text())
    assert np.float64(row["x"]).tobytes() == np.float64(value).tobytes()
    assert row["f32"] == (float(np.float32(value)) if abs(value) < 1e38 else 0.0)
    path.unlink()


def test_what_json_cannot_hold_is_null(tmp_path):
    path = tmp_path / "metrics.jsonl"
    append_metrics(path, 1, {"a": math.nan, "b": math.inf, "c": np.float32("nan")})
    rows = whole_lines(path.read_text())
    assert [row for _, row in rows] == [{"step": 1, "a": None, "b": None, "c": None}]


def test_truncation_keeps_bytes_and_drops_half_lines(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert truncate_after(path, 3) == 0
    assert not path.exists()
    for step in range(1, 6):
        append_metrics(path, step, {"reward": step / 3, "time/step": 0.1})
    whole = path.read_text().splitlines(keepends=True)
    with path.open("a") as file:
        file.write('{"step": 6, "rew')  # the run was killed here
    assert [row["step"] for _, row in whole_lines(path.read_text())] == [1, 2, 3, 4, 5]
    assert truncate_after(path, 3) == 2
    assert path.read_text() == "".join(whole[:3])
    append_metrics(path, 4, {"reward": 4 / 3, "time/step": 0.1})
    assert path.read_text() == "".join(whole[:4])
    assert truncate_after(path, 0) == 4
    assert path.read_text() == ""


def _read_events(directory: Path) -> list[tuple[str, int, float]]:
    """(tag, step, value) as TensorBoard reads them; it checks every CRC."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory))
    events.Reload()
    return [(tag, event.step, event.value) for tag in sorted(events.Tags()["scalars"]) for event in events.Scalars(tag)]


def test_tensorboard_reads_the_events_of_a_run_and_of_its_resume(tmp_path):
    directory = tmp_path / "tensorboard"
    events = TensorBoardEvents(directory)
    for step in (1, 2, 3):
        events.metrics(step, {"reward": step / 4, "time/step": 0.5})
    assert _read_events(directory)[:3] == [("time/step", 1, 0.5), ("time/step", 2, 0.5), ("time/step", 3, 0.5)]
    events.close()
    events.close()
    resumed = TensorBoardEvents(directory)
    resumed.metrics(3, {"reward": 0.75, "time/step": math.nan})
    resumed.close()
    assert [(step, value) for tag, step, value in _read_events(directory) if tag == "train/reward"] == [
        (1, 0.25),
        (2, 0.5),
        (3, 0.75),
    ]


@pytest.mark.slow
def test_the_conductor_gets_by_without_torch_and_tensorflow(tmp_path):
    (tmp_path / "tensorflow.py").write_text("raise SystemExit('tensorflow was imported')")
    program = """
import sys
from pathlib import Path
from slurm_rlhf.config.schema import Logger
from slurm_rlhf.observe import live, run_status, timing
from slurm_rlhf.observe import log_tail as tail
writer = run_status.TensorBoardEvents(Path(sys.argv[1]))
writer.metrics(1, {"reward": 1.0})
for kind in ("rich", "plain", "none"):
    shown = live.make_progress(Logger(progress=kind))
    shown.begin(0, 1)
    shown.step(1, 1, {})
    shown.end()
assert not {"torch", "tensorflow"} & set(sys.modules), sys.modules.keys()
"""
    paths = {**os.environ, "PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}"}
    done = completed([sys.executable, "-c", program, str(tmp_path / "events")], env=paths)
    assert done.returncode == 0, done.stderr


def test_a_summary_is_whole_json_and_replaces_the_one_before(tmp_path):
    path = tmp_path / "summary.json"
    summary = Summary("running", 0, 9, None, None, None, None, 0.0, 0.0, 0, {"actor": 2}, 42)
    summary.write(path)
    summary.status, summary.eval_after, summary.reward_last = "failed", 0.5, math.nan
    summary.write(path)
    found = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert found["status"] == "failed"
    assert (found["eval_before"], found["eval_after"], found["reward_last"]) == (None, 0.5, None)
    assert found["world"] == {"actor": 2}
    assert os.listdir(tmp_path) == ["summary.json"]


def test_phases_add_up_and_tell_what_goes_on():
    stated: list[str] = []
    phases = Phases(stated.append)

    began = time.monotonic()
    with phases("rollout"), phases("reward"):
        time.sleep(0.05)
    with pytest.raises(RuntimeError), phases("update"):
        raise RuntimeError
    with phases("rollout"):
        pass
    assert stated == ["rollout", "reward", "rollout", "", "update", "", "rollout", ""]
    taken = phases.take()
    whole = time.monotonic() - began
    assert sorted(taken) == ["time/reward", "time/rollout", "time/update"]
    assert taken["time/reward"] >= 0.05
    assert sum(taken.values()) <= whole  # no moment is counted twice
    assert phases.take() == {}


RANK = """
import os, signal, time
print("pid", os.environ["RANK"], os.getpid(), flush=True)
if os.environ["RANK"] == "1":
    END
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("end", "exitcode"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", -9),
        ("raise SystemExit(3)", 3),
    ],
)
@pytest.mark.slow
def test_the_rank_that_failed_first_is_found(tmp_path: Path, end: str, exitcode: int) -> None:
    script, log = tmp_path / "rank.py", tmp_path / "actor.n1.torchrun.log"
    script.write_text(RANK.replace("END", end))
    log.write_text("of an earlier start\n")
    mark = log.stat().st_size
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    with log.open("a") as out:
        subprocess.run(command, stdout=out, stderr=out, stdin=subprocess.DEVNULL, timeout=HANG_S, check=False)
    pids = dict(line.split()[1:] for line in log.read_text().splitlines() if line.startswith("pid "))
    assert first_failure(log, mark) == FailedProcess(1, int(pids["1"]), exitcode)
    assert first_failure(log, log.stat().st_size) is None  # nothing of an earlier start
    assert first_failure(tmp_path / "none.log") is None
