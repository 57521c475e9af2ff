"""Records and messages of a run while it goes on."""

from __future__ import annotations

import json
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from sampled_responses import response

from slurm_rlhf.checkpoint.directory import CheckpointDir
from slurm_rlhf.cluster.stop import END, INTERRUPT, NOT_ARRANGED, Arrangement, Continuation, Reason, StopRequested
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import CallTimeout, ConfigError, RemoteError, RoleDied
from slurm_rlhf.groups.run_lock import MOST_RESTARTS, refuse_restart, refuse_short_time
from slurm_rlhf.observe.run_log import read_events, read_samples
from slurm_rlhf.observe.run_status import read_run_status
from slurm_rlhf.placement.rank_map import place
from slurm_rlhf.placement.topology import RoleSize, Topology
from slurm_rlhf.records import Experience, Prompt, SyncConnection, VersionSpan, pack
from slurm_rlhf.rewards.scored import Rewards
from slurm_rlhf.run.conductor import Conductor, lead_run
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
        whose, spans = (10 * (row // SAMPLES), f"response {row}", row % SAMPLES), [VersionSpan(0, row + 1, 4)]
        trajectories.append(response(*whose, row + 1, ids, versions=spans, engine=row))
        trajectories[-1].rollout_logprobs[:] = -row / 10
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


def test_a_sample_has_all_that_is_known_of_a_response(tmp_path: Path) -> None:
    shown = reporting(tmp_path)
    shown.recorder.pieces = lambda ids: [f"t{token}" for token in ids]
    shown.samples(*batch_of(5))
    found = read_samples(tmp_path / "samples.jsonl")
    assert [sample.response for sample in found] == [f"response {row}" for row in range(6)]
    last = found[-1]
    assert (last.step, last.prompt, last.prompt_index, last.sample) == (5, "prompt 2", 20, 1)
    assert (last.reward, last.score, last.advantage, last.version, last.engine) == (5.0, 4.0, 5.0, 4, 5)
    assert last.label == "{'answer': 2}"
    assert (last.tokens, last.logprobs) == (["t0", "t1", "t2", "t3", "t4", "t5"], [-0.5] * 6)
    assert last.actor_logprobs == [0.0] * 6
    assert found[0].score is None  # NaN
    events = next((tmp_path / "tensorboard").iterdir()).read_bytes()
    assert b"    response 5" in events
    assert b"samples/5" in events
    reporting(tmp_path / "without", samples=0).samples(*batch_of(5))
    assert not (tmp_path / "without" / "samples.jsonl").exists()


def test_responses_whose_rewards_failed_are_among_the_samples_with_the_reason(tmp_path: Path) -> None:
    shown, (batch, experience) = reporting(tmp_path, samples=1), batch_of(5)
    batch.scored.failed = np.array(["", "late: it did not return", "", "", "raised: no", ""])
    shown.samples(batch, experience)
    found = {sample.response: sample.failed for sample in read_samples(tmp_path / "samples.jsonl")}
    assert found.items() >= {"response 1": "late: it did not return", "response 4": "raised: no"}.items()
    assert len(found) <= 3


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


def test_events_of_a_run_that_is_asked_to_stop_and_fails_later(tmp_path: Path) -> None:
    run = reporting(tmp_path)
    run.begin(RunState(seed=0), 9, None)
    run.note("warning: something")
    run.step(1, 9, {"reward": 0.5})
    run.stopped("SIGUSR1", goes_on=True)
    later = reporting(tmp_path)
    later.begin(RunState(seed=0, step=1), 9, tmp_path)
    later.failed(CallTimeout("actor rank 0 did not answer train_step within 5 s"))
    stated = [(event.event, event.step) for event in read_events(tmp_path / "events.jsonl")]
    assert stated == [("start", 0), ("warning", 0), ("stop", 1), ("requeue", 1), ("resume", 1), ("hang", 1)]
    page = (tmp_path / "report.html").read_text()
    assert '"status":"failed"' in page
    assert '"event":"requeue"' in page


def test_the_report_is_written_when_it_is_due_and_costs_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    written: list[int] = []

    def write(path: Path, runs: list[RunDirectory]) -> None:
        written.append(recorder.step)
        clock[0] += 0.5

    monkeypatch.setattr("slurm_rlhf.run.recording.write_page", write)
    monkeypatch.setattr("slurm_rlhf.run.recording.time.monotonic", lambda: clock[0])
    config = Config(run_dir=str(tmp_path))
    config.logger.report_steps = 5
    recorder = Recorder(config, RunDirectory(tmp_path), print)
    for step in range(1, 41):
        clock[0] += 6.0
        recorder.done(step)
    # The first step, then every fifth one that is at least 50 s after it.
    assert written == [1, 10, 20, 30, 40]
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


ONE = place(Topology.uniform(["n1"], 1), [RoleSize("actor", 1, 1)])
LAUNCHER: Any = None  # these conductors start nothing: their work is replaced


def test_a_checkpoint_that_takes_too_long_for_the_signals_lead_is_warned_of_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = reporting(tmp_path, tensorboard=False)  # slurm.signal_lead_s = 600
    run.saved(1, 300, 300)
    assert "warning" not in capsys.readouterr().out
    run.saved(2, 310, 310)  # a step may be under way when the signal comes
    said = capsys.readouterr().out
    assert "warning: saving took 310 s" in said
    assert "leaves 600 s (slurm.signal_lead_s): raise it and --signal=B:USR1@SECONDS to 930 or more" in said
    run.saved(3, 700, 700)
    assert "warning" not in capsys.readouterr().out


def test_a_run_that_never_gets_to_a_step_does_not_requeue_itself_for_ever(tmp_path: Path) -> None:
    file = tmp_path / "restart_guard"
    for _ in range(2):
        for _ in range(MOST_RESTARTS - 1):
            refuse_restart(file, False, 600)
        refuse_restart(file, True, 600)  # a step was done: the count begins anew
    for _ in range(MOST_RESTARTS - 1):
        refuse_restart(file, False, 600)
    with pytest.raises(ConfigError, match=rf"{MOST_RESTARTS} times in a row .*slurm.signal_lead_s = 600"):
        refuse_restart(file, False, 600)
    assert not file.exists()  # whoever submits it again starts anew


def test_an_allocation_that_is_all_kept_for_saving_is_refused() -> None:
    refuse_short_time(None, 600)
    refuse_short_time(time.time() + 700, 600)
    with pytest.raises(ConfigError, match=r"ends in 300 s, .* give --slurm.signal_lead_s=100 or less"):
        refuse_short_time(time.time() + 300.3, 600)


def test_without_a_checkpoint_earlier_metrics_are_put_aside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for start in range(3):
        run = reporting(tmp_path, tensorboard=False)
        run.begin(RunState(seed=0), 9, None)
        (tmp_path / "tensorboard").mkdir()
        said = capsys.readouterr().out
        assert ("there is no checkpoint to go on from" in said) is (start > 0)
        run.step(1, 9, {"reward": float(start)})
        assert (f"kept as metrics.{start}.jsonl" in said) is (start > 0)
        if not start:
            run.step(2, 9, {"reward": 0.5})
    kept = [len((tmp_path / name).read_text().splitlines()) for name in ("metrics.1.jsonl", "metrics.2.jsonl")]
    assert kept == [2, 1]
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["reward"] == 2.0
    assert (tmp_path / "tensorboard.1").is_dir()


def test_a_resume_says_from_where_and_how_many_steps_are_done_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = reporting(tmp_path, tensorboard=False)
    first.begin(RunState(seed=0), 9, None)
    assert "resuming" not in capsys.readouterr().out
    for step in (1, 2, 3):
        first.step(step, 9, {"reward": 1.0})
    for step, again in ((1, ", 2 later steps are done again"), (1, "")):
        reporting(tmp_path, tensorboard=False).begin(RunState(seed=0, step=step), 9, tmp_path / "step_000001")
        assert f"resuming from {tmp_path / 'step_000001'} at step 1/9{again}\n" in capsys.readouterr().out


def test_a_stop_before_the_first_step_says_that_nothing_is_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step, stated in ((0, "no step was done, so there is nothing to save"), (2, "saved at step 2/9")):
        run = reporting(tmp_path / str(step), tensorboard=False)
        run.begin(RunState(seed=0, step=step), 9, None)
        run.stopped("Ctrl-C")
        assert f"stopped by Ctrl-C; {stated}" in capsys.readouterr().out


def test_the_summary_says_how_far_a_start_is_until_the_steps_begin(tmp_path: Path) -> None:
    summary = tmp_path / "summary.json"
    run = reporting(tmp_path, tensorboard=False)
    run.note("before there is a run")
    assert not summary.exists()
    run.begin(RunState(seed=0), 9, None)
    assert json.loads(summary.read_text())["starting"] == f"run directory {tmp_path}, 9 steps"
    run.note("loading actor; starting 2 engines")
    found = read_run_status(tmp_path / "metrics.jsonl", summary)
    assert (found.status, found.total, found.starting) == ("running", 9, "loading actor; starting 2 engines")
    assert 0 <= found.starting_s < 300
    run.stepping()
    run.note("warning: something")
    assert "starting" not in json.loads(summary.read_text())
    assert read_run_status(tmp_path / "metrics.jsonl", summary).starting == ""
    run._progress = shown = mock.Mock()
    for phase in ("rollout", "update"):
        run.phase(phase)
        run.answered(3, 40)
    batch = Config().rollout.batch_size * Config().rollout.n_samples_per_prompt
    phases = mock.call.phase("rollout", batch), mock.call.phase("update", 0)
    assert shown.mock_calls == [phases[0], mock.call.answered(3, 40), phases[1], mock.call.answered(3, 40)]


@pytest.mark.parametrize("end", ["stopped", "failed"])
def test_a_start_that_ends_is_no_start_any_more(tmp_path: Path, end: str) -> None:
    run = reporting(tmp_path, tensorboard=False)
    run.begin(RunState(seed=0), 9, None)
    if end == "stopped":
        run.stopped("Ctrl-C")
    else:
        run.failed(ConfigError("x"))
        run.note("said later")
    written = json.loads((tmp_path / "summary.json").read_text())
    assert written["status"] == end
    assert "starting" not in written


HANG = Reason("a hang in phase update of step 6: hang-6", True, 1)


@pytest.mark.parametrize("resume", ["auto", "never"])
@pytest.mark.parametrize("saved", [False, True])
def test_a_run_that_broke_says_last_from_where_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], saved: bool, resume: str
) -> None:
    def work(self: Conductor, stop: object) -> None:
        self.reporting.begin(RunState(seed=0, step=5), 9, None)
        if saved:
            CheckpointDir(tmp_path).begin(5)
            CheckpointDir(tmp_path).commit(5, {})
        raise RemoteError("role actor died", remote_traceback="its own lines")

    monkeypatch.setattr(Conductor, "work", work)
    config = Config(run_dir=str(tmp_path), resume=resume)
    config.logger.progress, config.logger.tensorboard = "plain", False
    with pytest.raises(RemoteError, match=r"role actor died$"):
        lead_run(config, ONE, LAUNCHER, "n1", Continuation())
    assert "in the role:\nits own lines" in (tmp_path / "logs" / "conductor.n1.0.log").read_text()
    last, word = capsys.readouterr().out.splitlines()[-1], "the same command" if resume == "auto" else "--resume=auto"
    goes_on = f"{word} goes on from the newest checkpoint, {tmp_path}/checkpoints/step_000005"
    assert last == (goes_on if saved else f"there is no checkpoint yet: {word} begins anew")


@pytest.mark.parametrize(
    ("reason", "holds", "code"), [(HANG, True, 1), (END, True, 0), (END, False, NOT_ARRANGED), (INTERRUPT, True, 130)]
)
def test_what_the_scheduler_arranged_is_said_last_and_the_exit_code_tells_whether_it_did(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    reason: Reason,
    holds: bool,
    code: int,
) -> None:
    """Trainers that hung can save nothing; a job with `afterok` of one that nothing follows must not start."""

    class Requeues(Continuation):
        def go_on(self) -> Arrangement:
            return Arrangement("job 7 is requeued", holds)

    def hang(self: Conductor, stop: object) -> None:
        self.reporting.begin(RunState(seed=0, step=5), 9, None)
        raise StopRequested(reason, saved=False)

    monkeypatch.setattr(Conductor, "work", hang)
    config = Config(run_dir=str(tmp_path))
    config.logger.progress, config.logger.tensorboard = "plain", False
    assert lead_run(config, ONE, LAUNCHER, "n1", Requeues()) == code
    last = [f"stopped by {reason.what}; there is no checkpoint yet", *["job 7 is requeued"] * reason.requeue]
    assert capsys.readouterr().out.splitlines()[-len(last) :] == last
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "stopped"


def test_a_run_keeps_others_out_of_its_directory_and_calls_off_at_its_end_what_was_to_follow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Waits(Continuation):
        def finished(self) -> str:
            return "job 8 is cancelled"

    def work(self: Conductor, stop: object) -> None:
        with pytest.raises(ConfigError, match=r"is in use by another run\. Wait for it, or give this .* --run_dir"):
            lead_run(self.config, ONE, LAUNCHER, "n1", Continuation())

    monkeypatch.setattr(Conductor, "work", work)
    assert lead_run(Config(run_dir=str(tmp_path)), ONE, LAUNCHER, "n1", Waits()) == 0
    assert capsys.readouterr().out.splitlines() == ["job 8 is cancelled"]
