"""Samples, events and calls in the files of a run: what is kept, over kills and resumes, too."""

from __future__ import annotations

import json
import logging
import os
import random
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from recorded_run import Clock, sample

from slurm_rlhf.errors import CallTimeout, RoleDied, RunError, RunHung, SyncBroken, SyncError, of_hang
from slurm_rlhf.observe.run_log import (
    WORKERS_LOST,
    EventLog,
    WarningEvents,
    append_line,
    choose,
    engines_lost,
    kind_of_failure,
    kind_of_note,
    markdown_text,
    read_events,
    read_rows,
    read_samples,
    workers_lost,
)
from slurm_rlhf.observe.run_status import Summary
from slurm_rlhf.observe.timing import KEPT, CallSpans, append_timeline, joined, thinned
from slurm_rlhf.wire.messages import CallFailure, Peer


def test_lines_with_any_text_are_read_back_and_half_lines_are_not(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    texts = ["a\u2028b\x85c", "line\nline\r", "\ud800", "ü"]
    for step, text in enumerate(texts, 1):
        append_line(path, {"step": step, "text": text})
    with path.open("a") as file:
        file.write('{"step": 9, "te')
    assert [row["text"] for row in read_rows(path)] == [*texts[:2], "?", "ü"]
    assert read_rows(tmp_path / "missing") == []


def test_samples_are_drawn_by_seed_and_step() -> None:
    assert choose(7, 3, 2, 100) == choose(7, 3, 2, 100)
    drawn = {tuple(choose(7, step, 2, 100)) for step in range(20)}
    assert len(drawn) == 20
    assert len({tuple(choose(seed, 3, 2, 100)) for seed in range(20)}) == 20
    assert choose(7, 3, 5, 2) == [0, 1]
    assert choose(7, 3, 0, 2) == []


def test_samples_are_read_back(tmp_path: Path) -> None:
    path, made = tmp_path / "samples.jsonl", [sample(step, 0, random.Random(1)) for step in (1, 2)]
    for each in made:
        append_line(path, asdict(each))
    append_line(path, {"step": 3, "prompt": "of another version"})
    assert read_samples(path) == made


def test_a_sample_is_code_in_markdown() -> None:
    made = replace(sample(2, 1, random.Random(1)), response="red\n" + "x" * 900, reward=0.25)
    assert "reward 0.25, stop" in markdown_text(made)
    assert "\n    xxx" in markdown_text(made)


def test_events_are_kept_over_starts_with_their_time_and_step(tmp_path: Path) -> None:
    clock = Clock(5.0)
    events = EventLog(tmp_path / "events.jsonl", clock)
    events.append("start", 0, "")
    clock.now = 7.25
    EventLog(tmp_path / "events.jsonl", clock).append("error", 3, "x" * 9999)
    first, last = read_events(tmp_path / "events.jsonl")
    assert (first.event, first.at, first.step) == ("start", 5.0, 0)
    assert (last.at, last.step, len(last.text)) == (7.25, 3, 2000)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("warning: saving took 300 s", "warning"),
        ("reward.py: warning: it is slow", "warning"),
        ("engine 1 on gpu02 is lost: by its words it is no event", ""),
        ("step 3: engine 1 on gpu02 is far below its peers for 2 steps", ""),
        ("roles: actor x 2", ""),
    ],
)
def test_which_notes_are_events(text: str, kind: str) -> None:
    assert kind_of_note(text) == kind


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (CallTimeout("actor rank 1 on n2 was asked 600 s ago"), "hang"),
        (RoleDied("rank 0 is lost", hang=True), "hang"),
        (RunHung("step 3: actor rank 1 is behind"), "hang"),
        (SyncBroken("a link is cut", hang=True), "hang"),
        (SyncError("weights arrived different"), "error"),
        (RoleDied("role actor died: it hung in its last step, and did not answer"), "error"),  # words are no reason
        (KeyError("not heard from"), "error"),
    ],
)
def test_which_failures_are_hangs(error: Exception, kind: str) -> None:
    assert kind_of_failure(error) == kind


def test_a_hang_is_one_at_the_conductor_when_a_rank_says_so() -> None:
    peer = Peer("rollout", 0, 1, "n1", 7)
    stated = [CallFailure.of(error).raised(peer, "generate") for error in (CallTimeout("late"), RunError("broken"))]
    assert [kind_of_failure(error) for error in stated] == ["hang", "error"]


def test_logged_warnings_are_events_and_errors_are_not() -> None:
    stated: list[tuple[str, str]] = []
    logger = logging.getLogger("slurm_rlhf.test_records")
    handler = WarningEvents(lambda kind, text: stated.append((kind, text)))
    logger.addHandler(handler)
    logger.propagate = False
    logger.warning("%s; once more over a new group", "a peer left")
    logger.warning("rank 0 is lost: it was not heard from for 20 s", extra=of_hang(True))
    logger.error("an error")
    logger.removeHandler(handler)
    assert stated == [
        ("warning", "a peer left; once more over a new group"),
        ("hang", "rank 0 is lost: it was not heard from for 20 s"),
    ]


def test_an_event_that_cannot_be_written_does_not_reach_who_logs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The I/O thread logs, too: it would end, and with it all communication."""
    events = EventLog(tmp_path / "gone" / "events.jsonl")
    handler = WarningEvents(lambda kind, text: events.append(kind, 0, text))
    handler.handle(logging.LogRecord("slurm_rlhf", logging.WARNING, "", 0, "rank 0 is lost", (), None))
    assert "No such file or directory" in capsys.readouterr().err


def test_calls_that_overlap_or_follow_at_once_are_one_span() -> None:
    clock = Clock(100.0)
    spans = CallSpans(clock)
    first = spans.began("rollout", 0, "generate")
    clock.now += 1
    second = spans.began("rollout", 0, "generate")
    clock.now += 1
    first()
    spans.phase("update")
    long = spans.began("actor", 1, "train_step")
    clock.now += 2
    second()
    row = spans.take().line(1)
    assert row["seconds"] == 4.0
    assert row["calls"] == [["actor", 1, "train_step", 2.0, 4.0], ["rollout", 0, "generate", 0.0, 4.0]]
    assert row["phases"] == [["update", 2.0, 4.0]]
    clock.now += 1
    long()
    spans.phase("")
    clock.now += 1
    row = spans.take().line(2)  # calls and phases that were in progress go on
    assert row["calls"] == [["actor", 1, "train_step", 0.0, 1.0]]
    assert row["phases"] == [["update", 0.0, 1.0]]
    assert spans.take().calls == {}


def test_spans_are_joined_until_they_are_few() -> None:
    assert joined([(3, 4), (0, 1), (1, 2), (1.5, 1.7)], 0) == [(0, 2), (3, 4)]
    many = {("actor", 0, "a"): [(float(n), n + 0.5) for n in range(1000)], ("actor", 1, "a"): [(0.0, 1.0), (9.0, 9.5)]}
    found = thinned(many, 10, 0.001)
    assert sum(map(len, found.values())) <= 10
    assert found["actor", 0, "a"][0][0] == 0.0
    assert found["actor", 0, "a"][-1][1] == 999.5
    assert len(thinned(many, 1, 0.001)) == 2


def test_the_timeline_keeps_the_last_steps_only(tmp_path: Path) -> None:
    path = tmp_path / "timeline.jsonl"
    for step in range(1, 6 * KEPT):
        append_timeline(path, {"step": step})
        assert len(path.read_text().splitlines()) <= 2 * KEPT
    steps = [json.loads(line)["step"] for line in path.read_text().splitlines()]
    assert steps == list(range(steps[0], 6 * KEPT))
    assert len(steps) >= KEPT


def test_engines_that_a_run_does_without_are_known_by_number_and_forgotten_with_its_next_start(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    events = EventLog(path, Clock(1.0))
    lost = f"{WORKERS_LOST} on n1: cable cut"
    events.append("warning", 3, lost)
    for kind, engine in (("engine lost", 3), ("engine lost", 1), ("engine joined", 3), ("warning", 2)):
        events.append(kind, 4, f"in other words, engine {engine}", engine)
    assert engines_lost(read_events(path)) == {1: "in other words, engine 1"}
    assert workers_lost(read_events(path)) == [lost]
    events.append("resume", 4, "step 4 of 9")
    assert engines_lost(read_events(path)) == {}
    events.append("warning", 5, lost)
    events.append("resume", 5, "step 5 of 9")
    assert workers_lost(read_events(path)) == []
    assert "engine" not in path.read_text().splitlines()[-1]


def test_a_summary_is_on_disk_when_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers find a whole one after a crash of the node, too."""
    synced: list[str] = []
    flush = os.fsync

    def note(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    Summary("running", 0, 9, None, None, None, None, 0.0, 0.0, 0, {}, 0).write(tmp_path / "summary.json")
    assert any("summary.json" in path for path in synced)
