"""What the recorder keeps of a step, and that nothing which goes wrong with it ends a run."""

from __future__ import annotations

import json
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import CallTimeout, RoleDied
from slurm_rlhf.observe.run_log import read_events, read_samples
from slurm_rlhf.records import Experience, Prompt, SyncConnection, Trajectory, VersionSpan, pack
from slurm_rlhf.rewards.function import Rewards
from slurm_rlhf.run.recording import Recorder
from slurm_rlhf.run.reporting import Reporting
from slurm_rlhf.run.run_state import RunState
from slurm_rlhf.run_directory import RunDirectory
from slurm_rlhf.sampling.batches import Batch
from slurm_rlhf.wire.calls import DeviceReport, RankCalls
from slurm_rlhf.wire.handles import EngineHandle, RoleHandle

PROMPTS, SAMPLES = 3, 2


def batch_of(step: int) -> tuple[Batch, Experience]:
    """Three prompts with two responses each; response i has i + 1 tokens."""
    ids = np.arange(2, dtype=np.int32)
    prompts = [Prompt(10 * place, f"prompt {place}", ids, label={"answer": place}) for place in range(PROMPTS)]
    trajectories = []
    for row in range(PROMPTS * SAMPLES):
        tokens = np.arange(row + 1, dtype=np.int32)
        logprobs = np.full(row + 1, -row / 10, np.float32)
        mask, spans = np.ones(row + 1, np.bool_), [VersionSpan(0, row + 1, 4)]
        prompt, number = 10 * (row // SAMPLES), row % SAMPLES
        trajectories.append(
            Trajectory(prompt, number, ids, tokens, logprobs, mask, "stop", f"response {row}", spans, row)
        )
    experience = pack(trajectories, [0.0] * len(trajectories))
    experience.columns["advantages"] = np.concatenate([np.full(n + 1, n, np.float32) for n in range(6)])
    experience.columns["logprobs"] = experience.columns["rollout_logprobs"] + np.float32(0.5)
    rewards = Rewards(np.arange(6, dtype=np.float32), scores=np.array([np.nan, *range(5)], np.float32))
    return Batch(step, prompts, trajectories, {}, 1.0, {}, scored=rewards), experience


def reporting(root: Path, **settings: object) -> Reporting:
    config, directory = Config(run_dir=str(root)), RunDirectory(root)
    config.logger.progress, config.logger.samples = "plain", 6
    for name, value in settings.items():
        setattr(config.logger, name, value)
    directory.make()
    return Reporting(config, directory, {"actor": 1})


def test_a_sample_has_all_that_is_known_of_a_response(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = reporting(tmp_path, print_samples=True)
    shown.recorder.pieces = lambda ids: [f"t{token}" for token in ids]
    shown.samples(*batch_of(5))
    found = read_samples(tmp_path / "samples.jsonl")
    assert [sample.response for sample in found] == [f"response {row}" for row in range(6)]
    last = found[-1]
    assert (last.step, last.prompt, last.prompt_index, last.sample) == (5, "prompt 2", 20, 1)
    assert (last.reward, last.score, last.advantage, last.version, last.engine) == (5.0, 4.0, 5.0, 4, 5)
    assert last.label == "{'answer': 2}"
    assert last.tokens == ["t0", "t1", "t2", "t3", "t4", "t5"]
    assert last.logprobs == [-0.5] * 6
    assert last.actor_logprobs == [0.0] * 6
    assert found[0].score is None  # NaN
    assert "  < response 5" in capsys.readouterr().out
    events = next((tmp_path / "tensorboard").iterdir()).read_bytes()
    assert b"    response 5" in events
    assert b"samples/5" in events


def test_no_samples_are_kept_where_none_are_wanted(tmp_path: Path) -> None:
    reporting(tmp_path, samples=0).samples(*batch_of(5))
    assert not (tmp_path / "samples.jsonl").exists()


def test_a_resumed_run_writes_later_samples_again(tmp_path: Path) -> None:
    first = reporting(tmp_path)
    for step in (1, 2, 3):
        first.samples(*batch_of(step))
    whole = (tmp_path / "samples.jsonl").read_text()
    again = reporting(tmp_path)
    again.begin(RunState(seed=0, step=1), 3, tmp_path)
    assert [sample.step for sample in read_samples(tmp_path / "samples.jsonl")] == [1] * 6
    for step in (2, 3):
        again.samples(*batch_of(step))
    assert (tmp_path / "samples.jsonl").read_text() == whole
    anew = reporting(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 3}\n')
    anew.begin(RunState(seed=0), 3, None)
    assert (tmp_path / "samples.1.jsonl").read_text() == whole


def test_events_of_a_run_that_is_told_to_stop_and_fails_later(tmp_path: Path) -> None:
    run = reporting(tmp_path)
    run.begin(RunState(seed=0), 9, None)
    run.note("warning: something")
    run.step(1, 9, {"reward": 0.5})
    run.stopped("SIGUSR1", goes_on=True)
    later = reporting(tmp_path)
    later.begin(RunState(seed=0, step=1), 9, tmp_path)
    later.failed(CallTimeout("actor rank 0 did not answer train_step within 5 s"))
    told = [(event.event, event.step) for event in read_events(tmp_path / "events.jsonl")]
    assert told == [("start", 0), ("warning", 0), ("stop", 1), ("requeue", 1), ("resume", 1), ("hang", 1)]
    page = (tmp_path / "report.html").read_text()
    assert '"status":"failed"' in page
    assert '"event":"requeue"' in page


def test_the_report_is_written_when_it_is_due_and_costs_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    written: list[float] = []

    def write(directory: RunDirectory) -> None:
        written.append(clock[0])
        clock[0] += 0.5

    monkeypatch.setattr("slurm_rlhf.run.recording.write_report", write)
    monkeypatch.setattr("slurm_rlhf.run.recording.time.monotonic", lambda: clock[0])
    config = Config(run_dir=str(tmp_path))
    config.logger.report_steps = 5
    recorder = Recorder(config, RunDirectory(tmp_path), print)
    for step in range(1, 41):
        clock[0] += 6.0
        recorder.done(step)
    # The first step, then every fifth one that is at least 50 s after it.
    assert len(written) == 1 + 4
    assert 0.5 * len(written) < 0.015 * (clock[0] - 1000)
    recorder.end()
    assert len(written) == 6
    config.logger.report_steps = 0
    never = Recorder(config, RunDirectory(tmp_path), print)
    never.done(1)
    assert len(written) == 6


class Answering:
    """Calls of which one fails."""

    def call(self, role: str, rank: int, method: str, *_: Any) -> Future[Any]:
        future: Future[Any] = Future()
        if (role, rank) == ("actor", 1):
            future.set_exception(RoleDied("gone"))
        else:
            future.set_result(DeviceReport(used=100 + rank))
        return future


def test_ranks_are_asked_for_their_memory_and_calls_are_recorded(tmp_path: Path) -> None:
    timeout, server = Config().timeout, Answering()
    handles: dict[str, RoleHandle[Any]] = {
        "actor": RoleHandle(server, "actor", 2, timeout),  # type: ignore[arg-type]
        "rollout": EngineHandle(server, "rollout", 4, 2, timeout),  # type: ignore[arg-type]
    }
    run = reporting(tmp_path)
    run.begin(RunState(seed=0), 9, None)
    run.recorder.watch(handles)
    run.recorder.transfer = lambda: SyncConnection("gloo", "eth0", "10.0.0.1", "n1")
    handles["actor"].call(0, RankCalls.stacks)
    run.step(1, 9, {"reward": 0.5})
    layout = json.loads((tmp_path / "layout.json").read_text())
    assert layout["memory"] == {
        "actor": {"0": {"used": 100, "total": 0}},
        "rollout": {"0": {"used": 100, "total": 0}, "2": {"used": 102, "total": 0}},
    }
    assert layout["weight_transfer"] == {"backend": "gloo", "interface": "eth0"}
    (line,) = (tmp_path / "timeline.jsonl").read_text().splitlines()
    assert [call[:3] for call in json.loads(line)["calls"]] == [["actor", 0, "stacks"]]


def test_what_goes_wrong_is_said_once_and_the_run_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = reporting(tmp_path, tensorboard=False)
    run.begin(RunState(seed=0), 9, None)
    for name in ("report.html", "samples.jsonl", "timeline.jsonl"):
        (tmp_path / name).mkdir()
    (tmp_path / "report.html" / "file").touch()
    batch, experience = batch_of(1)
    for step in (1, 2):
        run.samples(batch, experience)
        run.step(step, 9, {"reward": 0.5})
    run.finished()
    said = capsys.readouterr().out
    assert said.count("will not be complete") == 1
    assert "Is a directory" in said
    assert "The run goes on" in said
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "finished"
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
