"""The content of a run's page: pure functions, on a recorded run and on what a kill leaves."""

from __future__ import annotations

import json
import math
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from recorded_run import RANKS, write_run

from slurm_rlhf.config.schema import Config
from slurm_rlhf.observe.run_log import RunEvent, Sample, append_line
from slurm_rlhf.report.page import (
    CHARACTERS,
    SAMPLES,
    RunFiles,
    content,
    distinct,
    embedded,
    groups,
    page,
    settings,
    short,
    shown_places,
)
from slurm_rlhf.report.pictures import (
    MOST_EVENTS,
    POINTS,
    curves,
    nodes,
    role_times,
    sessions,
    shown,
    step_times,
    timeline,
    weight_sync,
)
from slurm_rlhf.run_directory import RunDirectory

STEPS = 30


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFiles:
    return RunFiles.read(write_run(tmp_path_factory.mktemp("run"), STEPS))


def test_curves_have_every_metric_with_at_most_so_many_points() -> None:
    rows = [{"step": n + 1, "reward": float(n), "eval": float(n) if n % 100 == 0 else None} for n in range(5000)]
    found = curves(rows)
    assert len(found["steps"]) == len(found["values"]["reward"]) <= POINTS
    assert found["steps"][-1] == 5000
    assert found["values"]["reward"][:2] == [4.0, 13.0]  # means of nine neighbours
    assert sum(value is not None for value in found["values"]["eval"]) == 50
    assert curves(rows[:7])["values"]["reward"] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert curves([]) == {"steps": [], "tokens": [], "seconds": [], "values": {}}
    rows = [{"step": step, "response_tokens": 10, "time/step": 0.5} for step in range(1, 2 * POINTS + 1)]
    found = curves(rows)
    assert (found["steps"][-1], found["tokens"][-1], found["seconds"][-1]) == (2 * POINTS, 20 * POINTS, POINTS)
    assert (found["steps"][0], found["tokens"][0], found["seconds"][0]) == (2, 20, 1)


def test_the_phases_of_a_step_add_up_to_it() -> None:
    row = {"time/step": 10.0, "time/rollout": 4.0, "time/update": 3.0, "time/sync": 1.0, "time/sync_transfer": 0.9}
    rows = [row | {"step": 1}, row | {"step": 2, "time/checkpoint": 5.0, "time/mine": 0.5}]
    found = step_times(rows)
    assert list(found["phases"]) == ["rollout", "update", "sync", "checkpoint", "mine", "other"]
    assert found["phases"]["other"] == [2.0, 1.5]  # the checkpoint was written before the second step
    assert found["phases"]["checkpoint"] == [0.0, 5.0]
    assert step_times([]) == {"steps": [], "seconds": [], "phases": {}}


def test_sessions_end_by_their_last_event_or_were_killed() -> None:
    def event(kind: str, at: float, step: int) -> RunEvent:
        return RunEvent(kind, at, step, "")

    stated = [event("start", 0, 0), event("stop", 10, 4), event("requeue", 10, 4), event("resume", 60, 4)]
    stated += [event("warning", 65, 6), event("resume", 90, 4), event("checkpoint", 95, 7)]
    found = sessions(stated, 100.0, True)
    assert [(each["begin"], each["end"], each["first"], each["last"], each["how"]) for each in found] == [
        (0, 10, 0, 4, "stop"),
        (60, 65, 4, 6, "killed"),
        (90, 100.0, 4, 7, "running"),
    ]
    assert sessions(stated, 100.0, False)[-1]["how"] == "killed"
    hung = [event("start", 0, 0), event("hang", 10, 4), event("engine lost", 11, 4), event("finish", 90, 9)]
    assert sessions(hung, 100.0, False) == [{"begin": 0, "end": 90, "first": 0, "last": 9, "how": "finish"}]
    many = [event("checkpoint", n, n) for n in range(2 * MOST_EVENTS)] + [event("requeue", 0, 0)]
    assert len(shown(many)) == MOST_EVENTS
    assert shown(many)[-1].event == "requeue"


def test_the_timeline_has_a_row_for_each_rank_that_took_calls(run: RunFiles) -> None:
    found = timeline(run.timeline, run.layout)
    rows = [(row["role"], row["rank"], row["node"]) for row in found["rows"]]
    assert rows[0] == ("conductor", 0, "")
    assert ("rollout", 2, "gpu002") in rows
    assert len(rows) == 1 + 2 + 8 + 1 + 1
    assert found["left_out"] == 0
    last = found["steps"][-1]
    assert last["step"] == STEPS
    named = {(rows[row][:2], found["names"][name]): end - start for row, name, start, end in last["spans"]}
    assert named[("rollout", 0), "generate"] == pytest.approx(3.0)
    assert named[("conductor", 0), "update"] == pytest.approx(2.9)


def test_the_time_of_a_role_is_what_its_ranks_did_and_what_they_waited(run: RunFiles) -> None:
    found = role_times(run.timeline)
    seconds = sum(line["seconds"] for line in run.timeline) / len(run.timeline)
    assert found["actor"]["train_step"] == pytest.approx(2.5)
    assert found["critic"] == {"train_step": pytest.approx(2.9), "waits": pytest.approx(seconds - 2.9)}
    for calls in found.values():
        assert sum(calls.values()) == pytest.approx(seconds, rel=1e-3)


def test_the_picture_of_the_nodes_has_every_rank(run: RunFiles) -> None:
    found = nodes(run.layout, run.rows)
    ranks = [rank for node in found["nodes"] for slot in node["slots"] for rank in slot]
    assert len(ranks) == sum(RANKS.worlds.values())
    first = found["nodes"][0]["slots"]
    assert first[0][0] | {"tokens_per_s": 0} == {
        **{"role": "actor", "rank": 0, "engine": None, "tokens_per_s": 0},
        **{"used": 50 << 30, "total": 80 << 30},
    }
    assert first[0][0]["tokens_per_s"] == pytest.approx(61440 / 2.9 / 8, rel=0.1)
    assert (first[6][0]["engine"], first[7][0]["engine"]) == (0, 0)
    assert first[6][0]["tokens_per_s"] > 0
    assert first[7][0]["tokens_per_s"] is None  # the engine's rate is not its second rank's, too
    assert nodes({}, [])["nodes"] == []
    sync = weight_sync(run.layout, run.rows)
    assert sync["rate"] == pytest.approx(15.2e9 / 0.45)
    assert (sync["backend"], sync["interface"]) == ("nccl", "ib0")
    assert 0.5 < sync["link_share"] < 0.7


def test_settings_tell_defaults_and_differences_apart() -> None:
    configs = [{"train.seed": seed, "train.max_epochs": epochs} for seed, epochs in ((1, 1), (2, 1), (1, 3))]
    rows = {row["key"]: row for row in settings([*configs, {"train.gone": True, "actor.adam_betas": [0.9, 0.5]}])}
    assert rows["actor.adam_betas"]["values"] == [None, None, None, "0.9 0.5"]
    assert rows["train.max_epochs"]["values"] == ["1", "1", "3", None]
    assert rows["train.max_epochs"]["changed"]
    assert rows["train.max_epochs"]["about"] == "Passes over the experience of a step."
    assert rows["train.seed"]["default"] == str(Config().train.seed)
    assert rows["train.gone"] | {"about": ""} == {
        **{"key": "train.gone", "default": None, "values": [None, None, None, "true"]},
        **{"changed": True, "differs": True, "about": ""},
    }
    assert not any(row["differs"] for row in settings(configs[:1]))
    assert groups(configs) == [[0, 1], [2]]


def test_the_newest_evaluation_of_the_run_and_those_with_it(run: RunFiles, tmp_path: Path) -> None:
    assert [each["title"] for each in run.evaluations] == [f"step {STEPS}", "mine"]
    (sums,) = run.evaluations[0]["datasets"]
    assert (sums["name"], sums["failed"], [part["name"] for part in sums["sources"]]) == ("sums", 4, ["large", "small"])
    assert content([run], 0.0)["runs"][0]["evaluations"] == run.evaluations
    for name, text in (("step_000001.json", '{"datasets": ['), ("step_000000.json", "{}"), ("x/eval.json", "[]")):
        (tmp_path / "eval" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "eval" / name).write_text(text)
    assert RunFiles.read(RunDirectory(tmp_path)).evaluations == []


def test_samples_are_thinned_and_cut(tmp_path: Path) -> None:
    made = Sample(1, 0, 0, "p" * 9999, "r" * 20, None, 1.0, None, None, "stop", 0, 0, ["r" * 10] * 2, [-1.0] * 2, [])
    assert short(made)["prompt"].endswith("(9999 characters)")
    assert len(short(made)["prompt"]) < CHARACTERS + 50
    assert short(replace(made, prompt="p" * CHARACTERS))["prompt"] == "p" * CHARACTERS
    for step in range(1000):
        append_line(tmp_path / "samples.jsonl", asdict(replace(made, step=step)))
    run = RunFiles.read(RunDirectory(tmp_path))
    assert run.samples_of == 1000
    assert [sample.step for sample in run.samples] == shown_places(1000)
    assert len(set(shown_places(1000))) == SAMPLES
    assert shown_places(1000)[-151:] == [844, *range(850, 1000)]
    assert shown_places(3) == [0, 1, 2]
    long = Sample(1, 0, 0, "", "", None, 1.0, None, None, "stop", 0, 0, ["abc"] * 9000, [-1.0] * 9000, [])
    assert len(short(long)["tokens"]) == len(short(long)["logprobs"]) == CHARACTERS // 3


def test_names_tell_runs_apart() -> None:
    assert distinct(["a", "b"], ["/x/a", "/x/b"]) == ["a", "b"]
    assert distinct(["run", "run"], ["/x/run", "/y/run"]) == ["x/run", "y/run"]
    assert distinct(["run", "run"], ["/x/run", "/x/run"]) == ["run (1)", "run (2)"]


def test_a_directory_with_half_of_the_files_has_a_page(tmp_path: Path, run: RunFiles) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward": 1.0}\n{"step": 2, "rew')
    (tmp_path / "events.jsonl").write_text('{"event": "start"}\n[]\n')
    (tmp_path / "layout.json").write_text("{")
    (tmp_path / "timeline.jsonl").write_bytes(b"\xff\xfe\n")
    found = RunFiles.read(RunDirectory(tmp_path))
    stated = content([found, run], time.time())
    assert stated["runs"][0]["curves"] == {"steps": [1], "tokens": [], "seconds": [], "values": {"reward": [1.0]}}
    assert "reward" in page(stated)


def test_nothing_in_a_text_ends_the_element_that_holds_it() -> None:
    text = "</script><!--<script>&\u2028\U0001f600"
    found = embedded({"text": text})
    assert not set("<>&\u2028") & set(found)
    assert json.loads(found) == {"text": text}
    with pytest.raises(ValueError, match="Out of range"):
        embedded({"text": math.nan})


def test_the_size_of_a_report_does_not_grow_with_the_steps(tmp_path: Path) -> None:
    row: dict[str, Any] = {f"metric/{name}": 0.123456789 for name in range(60)}
    lines = [json.dumps({"step": step, "reward": 1.0, "time/step": 9.0, **row}) for step in range(1, 4001)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    text = page(content([RunFiles.read(RunDirectory(tmp_path))], 0.0))
    assert len(text) < 2e6
