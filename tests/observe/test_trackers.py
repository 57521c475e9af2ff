"""Trackers: what they are given arrives, over a resume, too, and nothing that they do ends or holds a run."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sqlite3
import struct
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from programs import completed, write_program
from recorded_run import sample
from waiting import HANG_S

from slurm_rlhf.cluster.processes import running
from slurm_rlhf.config.check import tracker_problems, without_secrets
from slurm_rlhf.config.schema import Config
from slurm_rlhf.observe.run_status import TensorBoardEvents
from slurm_rlhf.observe.sinks import TrackedRun
from slurm_rlhf.observe.trackers import ProcessSink, TrackerFailed, Trackers, kept_id
from slurm_rlhf.polling import wait_until
from slurm_rlhf.run_directory import RunDirectory

RUN = TrackedRun("0a1b2c3d", "run", "project", "/nowhere", False, {})


# --- what trackers keep of a run; an offline run of W&B is a log in the format of LevelDB -----------------------------


_BLOCK, _HEADER, _IDENT = 32768, 7, 7
_FULL, _FIRST, _LAST = 1, 2, 4


def records(path: Path) -> Iterator[Any]:
    """Yield every record of a file."""
    from wandb.proto.wandb_internal_pb2 import Record

    for data in _joined(path.read_bytes()):
        record = Record()
        record.ParseFromString(data)
        yield record


def _joined(data: bytes) -> Iterator[bytes]:
    place, parts = _IDENT, b""
    while place + _HEADER <= len(data):
        if (left := _BLOCK - place % _BLOCK) < _HEADER:
            place += left
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + _HEADER])
        part = data[place + _HEADER : place + _HEADER + length]
        place += _HEADER + length
        parts = part if kind in (_FULL, _FIRST) else parts + part
        if kind in (_FULL, _LAST):
            yield parts


def history(found: Iterable[Any]) -> list[dict[str, Any]]:
    """Return the rows of metrics among records."""
    rows = []
    for record in found:
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    return rows


def trackio_rows(database: Path) -> list[tuple[str, str, int, dict[str, Any]]]:
    """Return id and name of the run, step and metrics of each row of one project, oldest first."""
    with sqlite3.connect(database) as store:
        rows = store.execute("select run_id, run_name, step, metrics from metrics order by id").fetchall()
    return [(run, name, step, json.loads(metrics)) for run, name, step, metrics in rows]


# --- the tests --------------------------------------------------------------------------------------------------------


def started(root: Path, *names: str, **settings: Any) -> tuple[Trackers, list[str]]:
    """Open the trackers of a run directory; what they tell the user follows in the list."""
    config = Config(run_dir=str(root))
    config.logger.use = list(names)
    config.timeout.tracker = 90
    for name, value in settings.items():
        setattr(config.logger, name, value)
    directory, stated = RunDirectory(root), list[str]()
    directory.make()
    trackers = Trackers(config, directory, stated.append)
    trackers.open()
    return trackers, stated


def three_steps_and_a_resume(root: Path, *names: str) -> list[str]:
    """Give trackers steps 1 to 3, then in second processes steps 3 and 4; return what the user reads."""
    said = []
    for steps in ((1, 2, 3), (3, 4)):
        trackers, stated = started(root, *names)
        for step in steps:
            trackers.samples(step, [sample(step, place, random.Random(step)) for place in range(2)])
            trackers.metrics(step, {"reward": step / 4, "time/step": 2.0, "nan": float("nan")})
        trackers.metrics(1, {"eval/mean": 0.5})  # an evaluation that comes late
        trackers.close(failed=False)
        said += stated
    return said


@pytest.mark.parametrize(
    ("names", "problems"),
    [
        (["tensorboard"], []),
        ([], []),
        (["wandb", "weights"], ["there is no tracker 'weights' (valid: tensorboard, wandb, trackio, mlflow)"]),
        (
            ["mlflow", "mlflow"],
            ["mlflow needs mlflow, alembic, which are not installed here: pip install 'slurm_rlhf[mlflow]'"],
        ),
        (["trackio"], ["trackio needs trackio, which is not installed here: pip install 'slurm_rlhf[trackio]'"]),
    ],
)
def test_what_is_missing_is_said_before_the_start(
    names: list[str], problems: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    there = ("wandb", "sqlalchemy")
    monkeypatch.setattr("slurm_rlhf.config.check.find_spec", lambda name: name in there or None)
    config = Config()
    config.logger.use = names
    found = list(tracker_problems(config))
    assert len(found) == len(problems)
    assert all(problem in text for problem, text in zip(problems, found, strict=True))


def test_secrets_stay_out_of_files_and_messages() -> None:
    config = Config()
    config.slurm.setup = [
        "module load cuda",
        "export WANDB_API_KEY=abc; TOKENIZERS_PARALLELISM=false",
        "HF_TOKEN=hf_x python",
    ]
    found = list(tracker_problems(config))
    assert [text.split(",")[0] for text in found] == ["slurm.setup sets WANDB_API_KEY", "slurm.setup sets HF_TOKEN"]
    environment = {
        "WANDB_API_KEY": "0123456789",
        "MLFLOW_TRACKING_PASSWORD": "hunter22",
        "LANG": "0123456789",
        "A_TOKEN": "",
    }
    said = without_secrets("401 for key 0123456789 and hunter22", environment)
    assert said == "401 for key $WANDB_API_KEY and $MLFLOW_TRACKING_PASSWORD"


def test_a_run_keeps_its_id_and_a_broken_one_is_replaced(tmp_path: Path) -> None:
    first = kept_id(tmp_path / "trackers" / "id")
    assert kept_id(tmp_path / "trackers" / "id") == first
    assert kept_id(tmp_path / "others" / "id") != first
    (tmp_path / "trackers" / "id").write_text("0a1b")
    assert len(kept_id(tmp_path / "trackers" / "id")) == 8


def test_a_tracker_that_fails_is_reported_once_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def full(events: TensorBoardEvents, step: int, metrics: object) -> None:
        asked.append(step)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(TensorBoardEvents, "metrics", full)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    trackers, stated = started(tmp_path, "tensorboard", "wandb")
    for step in (1, 2, 3):
        trackers.metrics(step, {"reward": 0.5})
    trackers.close(failed=False)
    assert asked == [1]
    gone = f"[Errno 2] No such file or directory: '{tmp_path / 'none'}'"
    assert stated == [
        f"warning: {name} gets nothing more of this run: {why}. The run goes on"
        for name, why in (("wandb", gone), ("tensorboard", "[Errno 28] No space left on device"))
    ]


@pytest.mark.slow
def test_a_process_that_fails_or_dies_is_reported_with_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log"
    sink = ProcessSink("nosuch", log, 60)
    sink.open(RUN)
    with pytest.raises(TrackerFailed, match=f"^KeyError: 'nosuch'; its log is {log}$"):
        sink.close(False)
    assert "KeyError" in log.read_text()
    sink = ProcessSink("wandb", log, 60)
    with monkeypatch.context() as patch, contextlib.suppress(TrackerFailed):  # raised here if it is dead by now
        patch.setattr(sys, "executable", _program(tmp_path, "kill -9 $$"))
        sink.open(RUN)
    with pytest.raises(TrackerFailed, match=f"^its process ended with exit code -9; its log is {log}$"):
        sink.close(False)
    with pytest.raises(TrackerFailed):
        sink.metrics(1, {})
    trackers, stated = started(tmp_path / "run", "wandb")
    sink = trackers._sinks["wandb"]
    os.killpg(sink._process.pid, signal.SIGKILL)
    assert wait_until(lambda: sink._failed, HANG_S)
    for step in range(3):
        trackers.metrics(step, {})
    trackers.close(failed=True)
    assert len(stated) == 1
    assert stated[0].startswith("warning: wandb gets nothing more of this run: its process ended with exit code -9")


KEEPER = """
import sys
from slurm_rlhf.observe import sinks

class Keeper:
    open = lambda self, run: "opened"
    close = lambda self, failed: print("closed", failed, file=sys.stderr)

    def metrics(self, step, row):
        assert "why" not in row, row["why"]

sinks.SINKS["keeper"] = Keeper
sys.exit(sinks.main())
"""


@pytest.mark.parametrize(
    ("last", "answer", "said"),
    [
        (["metrics", 2, {}], "", "closed True\n"),  # the conductor was killed
        (["close", False], "", "closed False\n"),
        (["metrics", 2, {"why": "\nno\n"}], '{"failed": "AssertionError: no"}\n', "AssertionError: \nno"),
    ],
)
def test_a_tracker_is_closed_once_and_says_why_it_failed(last: list[Any], answer: str, said: str) -> None:
    calls = (["open", asdict(RUN)], ["metrics", 1, {}], last)
    done = completed([sys.executable, "-c", KEEPER, "keeper"], input="".join(json.dumps(call) + "\n" for call in calls))
    assert (done.stdout, done.stderr[: len(said)]) == ('{"note": "opened"}\n' + answer, said)


def test_a_process_that_hangs_holds_nobody_and_is_gone_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads nothing, and a process that it started would outlive it."""
    monkeypatch.setattr(sys, "executable", _program(tmp_path, "sleep 1000 & echo $! > child; wait"))
    sink = ProcessSink("wandb", tmp_path / "log", 0.5)
    sink.open(RUN)
    for step in range(200):
        sink.metrics(step, {"x" * 1000: 1.0})  # more than a pipe holds
    child = tmp_path / "child"
    assert wait_until(lambda: child.exists() and child.read_text().strip(), HANG_S)
    with pytest.raises(TrackerFailed, match=r"did not finish within 0.5 s \(timeout.tracker\)"):
        sink.close(False)
    assert wait_until(lambda: not running(int(child.read_text())), HANG_S)


def _program(root: Path, body: str) -> str:
    """Write a program that stands for Python, and ignores what it is asked to run."""
    return str(write_program(root / "python", f"#!/bin/bash\ncd {root}\n{body}\n"))


def require(module: str) -> None:
    """Skip where a package of sbatch/cpu.lock is missing; CI does not let that pass."""
    if find_spec(module) is None:
        pytest.skip(f"{module} of sbatch/cpu.lock is not installed: bash sbatch/environment.sh --cpu")


@pytest.fixture(scope="module")
def tracked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, list[str]]:
    """A run directory that two trackers were given, its id, what the user read; both at once, which saves time."""
    require("wandb")
    require("trackio")
    root = tmp_path_factory.mktemp("tracked")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("WANDB_MODE", raising=False)
        run_id = kept_id(root / "trackers" / "id")
        return root, run_id, three_steps_and_a_resume(root, "wandb", "trackio")


@pytest.mark.slow
def test_weights_and_biases_has_one_run_in_offline_directories(tracked: tuple[Path, str, list[str]]) -> None:
    root, run_id, said = tracked
    place = root / "trackers" / "wandb" / "wandb"
    assert said.count(f"wandb: offline; from a node with a network: wandb sync {place}/offline-run-*-{run_id}") == 2
    starts = sorted(place.glob(f"offline-run-*-{run_id}/run-{run_id}.wandb"))
    first, second = ([*records(start)] for start in starts)
    runs = [record.run for record in (*first, *second) if record.WhichOneof("record_type") == "run"]
    assert {(run.run_id, run.project, run.display_name) for run in runs} == {(run_id, "slurm_rlhf", root.name)}
    settings = {item.key: item.value_json for item in runs[0].config.update}
    assert settings["logger.project"] == '"slurm_rlhf"'
    rows = history(first)
    assert [row["train/reward"] for row in rows] == [0.25, 0.5, 0.75]
    assert [row["_step"] for row in rows] == [1, 2, 3]
    assert "train/nan" not in rows[0]
    assert (rows[2]["eval/mean"], rows[2]["evaluation_step"]) == (0.5, 1)
    assert [row["_step"] for row in history(second)] == [3, 4]
    table = json.loads((min(place.glob("offline-run-*")) / "files" / rows[0]["samples/path"]).read_text())
    assert table["columns"][:2] == ["step", "prompt"]
    assert [row[0] for row in table["data"]] == [1, 1]
    ends = [record.exit.exit_code for record in second if record.WhichOneof("record_type") == "exit"]
    assert ends == [0]


@pytest.mark.slow
def test_trackio_has_one_run_in_its_database(tracked: tuple[Path, str, list[str]]) -> None:
    root, run_id, said = tracked
    line = f"TRACKIO_DIR={root}/trackers/trackio trackio sync --project slurm_rlhf --space-id USER/SPACE"
    assert [text.endswith(line) for text in said].count(True) == 2
    assert len(said) == 4
    rows = trackio_rows(root / "trackers" / "trackio" / "slurm_rlhf.db")
    assert {row[:2] for row in rows} == {(rows[0][0], f"{root.name}-{run_id}")}
    values = [(step, metrics) for _, _, step, metrics in rows]
    assert [(step, row["train/reward"]) for step, row in values if "train/reward" in row] == [
        (1, 0.25),
        (2, 0.5),
        (3, 0.75),
        (3, 0.75),
        (4, 1.0),
    ]
    tables = [row["samples"]["_value"] for _, row in values if "samples" in row]
    assert [[line["step"] for line in table] for table in tables] == [[step, step] for step in (1, 2, 3, 3, 4)]
    assert [step for step, row in values if "eval/mean" in row] == [1, 1]
    # trackio prints: that gets into a log, and not into the progress display.
    assert "Resumed existing run" in (root / "logs" / "tracker.trackio.log").read_text()


@pytest.mark.full
def test_mlflow_has_one_run_in_its_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its packages want versions that the lock does not have, so they are in an environment of their own.

    python -m venv /tmp/mlflow && /tmp/mlflow/bin/pip install 'mlflow-skinny>=3' sqlalchemy alembic
    MLFLOW_PYTHON=/tmp/mlflow/bin/python bash tests/run.sh tests/observe/test_trackers.py -m full
    """
    python = os.environ.get("MLFLOW_PYTHON", sys.executable)
    if python == sys.executable:
        require("mlflow")
    root = Path(__file__).parents[2]
    monkeypatch.setattr("slurm_rlhf.observe.trackers.sys", SimpleNamespace(executable=python))
    monkeypatch.setenv("PYTHONPATH", str(root))
    run_id = kept_id(tmp_path / "trackers" / "id")
    said = three_steps_and_a_resume(tmp_path, "mlflow")
    database = tmp_path / "trackers" / "mlflow" / "mlflow.db"
    assert said == [f"mlflow: mlflow ui --backend-store-uri sqlite:///{database}"] * 2
    with sqlite3.connect(database) as store:
        runs = store.execute("select run_uuid, name, status from runs").fetchall()
        tags = store.execute("select value from tags where key = 'slurm_rlhf.run'").fetchall()
        rewards = store.execute(
            "select step, value from metrics where key = 'train/reward' order by step, timestamp"
        ).fetchall()
        late = store.execute("select step, value from metrics where key = 'eval/mean'").fetchall()
        params = dict(store.execute("select key, value from params").fetchall())
    assert [(name, status) for _, name, status in runs] == [(tmp_path.name, "FINISHED")]
    assert tags == [(run_id,)]
    assert set(rewards) == {(1, 0.25), (2, 0.5), (3, 0.75), (4, 1.0)}
    assert set(late) == {(1, 0.5)}
    assert params["logger.use"] == "['mlflow']"
    texts = sorted(database.parent.glob("artifacts/*/artifacts/samples/step_*.md"))
    assert [text.stem for text in texts] == [f"step_{step:06d}" for step in (1, 2, 3, 4)]
    assert "prompt" in texts[0].read_text()
