"""A whole PPO run: what it leaves behind, and that the engines had the actor's weights all along."""

from __future__ import annotations

import itertools
import json
import os
import re
import statistics
import sys
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from browser import open_page
from holds import Holds
from patched_ranks import Call, calls, in_one_piece, noted, patched_engines
from sums_task import REWARD
from training_runs import COMMAND, assert_close_metrics, finished, metrics, started, timeless, train
from waiting import HANG_S, until
from warm_runs import WarmRun, commands
from whole_run import EVALUATED, SAME, SMALL, STEPS, WORLD, Whole

from slurm_rlhf.report.page import RunFiles
from slurm_rlhf.run_directory import RunDirectory

pytestmark = [pytest.mark.engine, pytest.mark.slow]


# --- an engine that kills itself --------------------------------------------------------------------------------------


DYING = """
import os, signal, time
from pathlib import Path

PLACE = Path({place!r})

def die(when):
    (PLACE / "hold").mkdir(exist_ok=True)
    (PLACE / "hold" / "reward-hang").touch()
    (PLACE / when).write_text(str(time.time()))
    os.kill(os.getpid(), signal.SIGKILL)

def once(when):
    return not (PLACE / when).exists()

def change(module):
    step, load = module.VllmEngine.step, module.VllmEngine.load

    def dying_step(engine):
        landed = step(engine)
        status = engine.status
        if status.version == 1 and status.unfinished and status.sampled > 60 and once("generation"):
            die("generation")
        return landed

    def dying_load(engine, weights, version):
        def some(weights):
            for number, each in enumerate(weights):
                if number == 3 and version == 2 and once("update"):
                    die("update")
                yield each
        return load(engine, some(weights), version)

    module.VllmEngine.step, module.VllmEngine.load = dying_step, dying_load
"""


def dying_engine(place: Path) -> AbstractContextManager[None]:
    """Engine 1 dies in the middle of a batch, and of an update, in runs in `place` that start within it.

    Each time the reward function waits from then on, until the test lets it go: so an engine can come back before the
    run, whose steps take tenths of a second, is over.
    """
    return patched_engines(place / "dying", DYING.format(place=str(place)), ("1",))


# --- the tests --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def config(whole_run: Whole) -> Path:
    return whole_run.config


@pytest.fixture(scope="module")
def whole(whole_run: Whole) -> tuple[Path, str]:
    return whole_run.run_dir, whole_run.output


def test_the_run_directory_holds_everything(whole: tuple[Path, str]) -> None:
    run_dir, output = whole
    rows = metrics(run_dir)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    for row in rows:
        assert {"reward", "kl", "accuracy", "time/rollout", "time/update", "time/sync", "perf/tokens_per_s"} <= set(row)
    assert any(row["nll_loss"] > 0 for row in rows)
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert summary["steps"] == STEPS
    assert summary["policy_version"] == STEPS
    assert summary["world"] == {"actor": 2, "critic": 1, "reference": 1, "rollout": 2}
    for key in ("eval_before", "eval_after", "reward_first", "reward_last", "wall_s", "tokens_per_s"):
        assert isinstance(summary[key], float)
    assert list((run_dir / "tensorboard").glob("events.out.tfevents.*"))
    for role, ranks in {**summary["world"], "conductor": 1}.items():
        for rank in range(ranks):
            assert list((run_dir / "logs").glob(f"{role}.*.{rank}.log"))
    assert (run_dir / "config.toml").read_text().count("full_determinism = true") == 1
    assert not (run_dir / ".control" / "keys.json").exists()  # they end with the run
    assert f"{STEPS}/{STEPS}" in output


def test_its_ranks_were_forked_from_a_warm_process(whole: tuple[Path, str]) -> None:
    """A launcher that starts them in another way costs the tests most of their time, and fails none of them."""
    mine = [line for line in commands().values() if f"--run_dir={whole[0]}" in line]
    assert sum("rank_process --role=" in line and "torchrun" not in line for line in mine) == 6


def test_the_report_shows_the_run(whole: tuple[Path, str], tmp_path: Path) -> None:
    """The report has the run's data, and a browser draws it."""
    run_dir, _ = whole
    files = RunFiles.read(RunDirectory(run_dir))
    kinds = [event.event for event in files.events if event.event != "warning"]
    assert (kinds[0], kinds[-1], set(kinds[1:-1])) == ("start", "finish", {"checkpoint"})
    assert [sample.step for sample in files.samples] == [1, 1, 2, 2, 3, 3, 4, 4]
    for sample in files.samples:
        assert "".join(sample.tokens).startswith(sample.response)
        assert sample.reward == float(sample.label in sample.response)
        assert len(sample.tokens) == len(sample.logprobs) == len(sample.actor_logprobs) <= 8
        assert sample.logprobs == pytest.approx(sample.actor_logprobs, abs=1e-4)
    busy = {(role, rank, name) for line in files.timeline for role, rank, name, *_ in line["calls"]}
    assert {("rollout", 1, "generate"), ("actor", 1, "train_step"), ("reference", 0, "logprobs")} <= busy
    for line, row in zip(files.timeline, files.rows, strict=True):
        assert line["step"] == row["step"]
        assert line["seconds"] > 0
    assert files.layout["weight_transfer"]["backend"] == "gloo"
    used = [memory["used"] for ranks in files.layout["memory"].values() for memory in ranks.values()]
    assert len(used) == 6
    assert all(100 << 20 < each < 20 << 30 for each in used)
    with open_page(tmp_path) as page:
        page.open(run_dir / "report.html", 1280, 800, dark=False)
        assert page.complaints == []
        plots = page.value("[...document.querySelectorAll('[data-plot]')].filter(p => p.querySelector('.mark')).length")
        assert plots == page.value("document.querySelectorAll('[data-plot]').length") > 20
        assert page.value("document.querySelectorAll('#sample-list .token').length") > 8
        assert page.value("document.querySelectorAll('#ranks .rank').length") == 6


def test_the_self_check_passed(whole: tuple[Path, str]) -> None:
    run_dir, output = whole
    groups = [line.partition(":")[0] for line in output.splitlines() if line.startswith("self-check, ")]
    names = ("prompts", "rewards", "actor's forward", "sampled tokens", "first update")
    assert groups == [f"self-check, {name}" for name in names]
    figures = json.loads((run_dir / "summary.json").read_text())["self_check"]
    assert figures["again"] == figures["eval"] == 0.0
    assert max(figures[name] for name in ("alone", "engine", "reference")) < 1e-5
    assert figures["ratio"] == pytest.approx(1.0, abs=1e-6)
    rows = metrics(run_dir)
    assert all(row["first_ratio"] == pytest.approx(1.0, abs=1e-6) for row in rows)
    assert any(abs(row["ratio"] - 1.0) > 1e-3 for row in rows)  # the mean of all updates of a step


def test_engines_sampled_with_the_actors_weights_in_every_step(whole: tuple[Path, str]) -> None:
    for row in metrics(whole[0]):
        assert 0 < row["rollout_logprob_diff_max"] < 1e-5 or row["rollout_logprob_diff_max"] == 0


def test_an_engine_that_dies_twice_comes_back_and_changes_no_metric(
    config: Path, whole: tuple[Path, str], tmp_path: Path
) -> None:
    """Killed in the middle of a batch, and in the middle of the update with which it is back."""
    (tmp_path / "reward.py").write_text(REWARD)
    holds = Holds(tmp_path / "run.toml")
    world = (*WORLD, f"--reward.remote_url={tmp_path / 'reward.py'}")
    with dying_engine(tmp_path), started(config, tmp_path / "run", *world, warm=True) as run:
        for start, when in ((2, "generation"), (3, "update")):
            run.wait_until(lambda times=start: run.log().count("engine 1 has started") >= times, f"start {start}")
            assert (tmp_path / when).exists()
            holds.let_go("reward-hang")
        code, output = run.wait()
    assert code == 0, output
    assert timeless(metrics(tmp_path / "run")) == timeless(metrics(whole[0]))
    killed = r"rank 1 of engine 1 on \S+ \(pid \d+\) was killed by SIGKILL"
    assert len(re.findall(rf"engine 1 on \S+ is lost: {killed}. 1 of 2 engines go on", output)) == 2
    assert len(re.findall(r"engine 1 on \S+ takes part again from policy version 3 on", output)) == 1
    events = [event.event for event in RunFiles.read(RunDirectory(tmp_path / "run")).events]
    assert [event for event in events if event.startswith("engine")] == ["engine lost", "engine lost", "engine joined"]


def test_final_model_loads_in_transformers_and_vllm_and_they_agree(whole: tuple[Path, str]) -> None:
    program = Path(__file__).parents[1] / "support" / "final_model.py"
    done = WarmRun([sys.executable, "-u", str(program), str(whole[0] / "final")], dict(os.environ))
    output, _ = done.communicate(HANG_S)
    assert done.returncode == 0, output
    difference, changed = map(float, output.splitlines()[-1].split())
    assert difference < 1e-5
    assert changed > 0


def test_interrupted_twice_it_writes_the_same_metrics(config: Path, whole: tuple[Path, str]) -> None:
    """SIGTERM saves first; SIGKILL costs the steps behind the last checkpoint; neither shows in the numbers.

    Nor does the self-check, which the first of the three sessions leaves out, nor when and how checkpoints are written.
    """
    run_dir = config.parent / "interrupted"
    with started(config, run_dir, *WORLD, "--train.self_check=false", "--ckpt.save_steps=auto", warm=True) as run:
        run.wait_for_step(1)
        run.process.terminate()
        code, output = run.wait()
    assert code == 143
    assert "self-check" not in output
    saved = json.loads((run_dir / "summary.json").read_text())
    assert saved["status"] == "stopped"
    assert (run_dir / "checkpoints" / f"step_{saved['steps']:06d}").is_dir()
    with started(config, run_dir, *WORLD, "--ckpt.async_save=true", warm=True) as run:
        run.wait_for_step(3)
        run.process.kill()
        run.process.communicate()
        run.assert_gone()
    output = finished(config, run_dir, *WORLD)
    assert "resuming from" in output
    assert "self-check, first update: mean ratio 1" in output
    changed = re.search(r"^changed since step \d: .*ckpt.async_save true -> false", output, re.M)
    assert changed[0] in (run_dir / "events.jsonl").read_text()
    assert changed[0].partition(" ->")[0] in (run_dir / "report.html").read_text()
    assert timeless(metrics(run_dir)) == timeless(metrics(whole[0]))
    again, output = train(config, run_dir, *WORLD, "--actor.learning_rate=0.5")
    assert again == 0
    assert f"already finished: {len(metrics(run_dir))} steps are done in {run_dir}; these keys were changed" in output
    assert "-> 0.5 (raise train.max_steps to go on, or give another --run_dir)" in output


def test_resumed_by_other_ranks_and_engines_it_agrees_to_rounding(config: Path, whole: tuple[Path, str]) -> None:
    """It goes on from the whole run's checkpoint: the actor shrinks, the critic grows, one engine is left of two."""
    run_dir, half = config.parent / "resized", whole[0] / "checkpoints" / "step_000002"
    words = (f"--resume={half}", "--critic.num_gpus_per_node=2", *SAME)
    output = finished(config, run_dir, *words)
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["world"] == {"actor": 1, "critic": 2, "reference": 1, "rollout": 1}
    # The line of step 2 comes with its evaluation, which went on when the checkpoint was written.
    assert_close_metrics(metrics(run_dir), metrics(whole[0])[1:])
    assert "is not in this run directory any more: the best is chosen anew" in output
    assert summary["eval_after"] == json.loads((whole[0] / "summary.json").read_text())["eval_after"]


def test_evaluations_are_kept_and_the_best_checkpoint_is_named(whole: tuple[Path, str]) -> None:
    run_dir, output = whole
    summary = json.loads((run_dir / "summary.json").read_text())
    rows = metrics(run_dir)
    for row in rows:
        assert row["eval"] == pytest.approx((row["eval/greedy/mean"] + row["eval/sampled/mean"]) / 2)
        assert row["eval/sampled/mean_low"] <= row["eval/sampled/mean"] <= row["eval/sampled/mean_high"]
        assert row["eval/sampled/pass@1"] == pytest.approx(row["eval/sampled/mean"])
        assert row["eval/sampled/pass@1"] <= row["eval/sampled/pass@4"]
        kept = (run_dir / "eval" / f"step_{row['step']:06d}.jsonl").read_text().splitlines()
        responses = [json.loads(line) for line in kept]
        assert [one["dataset"] for one in responses] == ["greedy"] * 24 + ["sampled"] * 96
        assert statistics.fmean(one["score"] for one in responses[24:]) == pytest.approx(row["eval/sampled/mean"])
    figures = json.loads((run_dir / "eval" / f"step_{STEPS:06d}.json").read_text())
    assert figures["eval"] == summary["eval_after"] == rows[-1]["eval"]
    assert [one["name"] for one in figures["datasets"]] == ["greedy", "sampled"]
    assert len(figures["datasets"][1]["sources"]) > 1  # by label
    best = max(rows, key=lambda row: row["eval/sampled/mean"])
    assert summary["best"]["step"] == best["step"]
    assert summary["best"]["value"] == best["eval/sampled/mean"]
    assert (run_dir / summary["best"]["checkpoint"] / "manifest.json").exists()
    assert "evaluation of step 1: " in output


def test_eval_of_the_final_model_finds_what_the_last_evaluation_found(config: Path, whole: tuple[Path, str]) -> None:
    """Killed in the middle and started again: the greedy responses are those of the training's last evaluation."""
    out = config.parent / "evaluated"
    words = (f"--model={whole[0]}", f"--output={out}", *EVALUATED, "--vllm.max_num_seqs=4")
    eval_command = [*COMMAND[:-1], "eval"]
    with started(config, out, *words, command=eval_command, warm=True) as job:
        job.wait_for_file("output.jsonl")
        until(lambda: (out / "output.jsonl").read_bytes().count(b"\n") >= 5, "line 5", 0.005)
        job.process.kill()
        job.assert_gone()
    before = (out / "output.jsonl").read_bytes().count(b"\n")
    output = finished(config, out, *words, command=eval_command)
    assert 5 <= before < 120
    assert "are there from before" in output
    ours = [json.loads(line) for line in (out / "eval.jsonl").read_text().splitlines()]
    theirs = [json.loads(line) for line in (whole[0] / "eval" / f"step_{STEPS:06d}.jsonl").read_text().splitlines()]
    kept = ("dataset", "index", "sample", "source", "prompt", "label", "prompt_tokens")
    assert [[one[name] for name in kept] for one in ours] == [[one[name] for name in kept] for one in theirs]
    stated = ("response", "score", "answer", "response_tokens", "finish_reason")
    assert [[one[name] for name in stated] for one in ours[:24]] == [
        [one[name] for name in stated] for one in theirs[:24]
    ]
    figures = json.loads((out / "eval.json").read_text())["datasets"]
    trained = json.loads((whole[0] / "eval" / f"step_{STEPS:06d}.json").read_text())["datasets"]
    assert figures[0] == trained[0]
    assert "data set  prompts" in output
    assert "sampled, by source:" in output


def test_one_rank_and_one_engine_agree_to_rounding(small: Path, whole: tuple[Path, str]) -> None:
    summary = json.loads((small / "summary.json").read_text())
    assert summary["world"] == {"actor": 1, "critic": 1, "rollout": 1}  # no KL, no reference
    assert metrics(small)[0]["reward"] == metrics(whole[0])[0]["reward"]
    assert metrics(small)[0]["entropy"] == pytest.approx(metrics(whole[0])[0]["entropy"], rel=1e-5)


def test_evaluations_with_the_training_change_none_of_its_metrics(config: Path, small: Path) -> None:
    run_dir = config.parent / "alongside"
    output = finished(config, run_dir, *SMALL, *EVALUATED)
    assert "evaluation of step 1: " in output
    rows = [{name: value for name, value in row.items() if "eval" not in name} for row in metrics(run_dir)]
    alone = [{name: value for name, value in row.items() if "eval" not in name} for row in metrics(small)]
    assert timeless(rows) == timeless(alone)
    assert metrics(run_dir)[-1]["eval/greedy/mean"] == metrics(small)[-1]["eval/greedy/mean"]


@pytest.fixture(scope="module")
def colocated(config: Path) -> tuple[Path, list[Call]]:
    """(run directory, what its ranks did) of the small run on one slot in place of three."""
    run_dir = config.parent / "colocated"
    with noted(config.parent / "noted") as file:
        finished(config, run_dir, *SMALL, "--train.colocate_all=true", "--ds.enable_sleep=true", "--preflight=auto")
    return run_dir, calls(file)


def test_on_shared_slots_it_writes_the_same_metrics(colocated: tuple[Path, list[Call]], small: Path) -> None:
    run_dir, _ = colocated
    assert timeless(metrics(run_dir)) == timeless(metrics(small))
    log = next((run_dir / "logs").glob("conductor.*.log")).read_text()
    assert "weight transfer group 1: {'address': '127.0.0.1', 'backend': 'ipc'" in log
    assert "engines sleep: vLLM frees no memory on CPUs" in log
    phases = json.loads((run_dir / "summary.json").read_text())["phases"]
    assert {name for name in phases if phases[name]["predicted"]} == {"sampling", "forward", "update", "sync"}
    for row in metrics(run_dir):
        assert row["perf/sync_bytes"] == metrics(small)[0]["perf/sync_bytes"] > 0
        assert row["rollout_logprob_diff_max"] < 1e-5
        assert {"time/sync", "time/sleep", "time/wake_up"} <= set(row)


def test_on_shared_slots_one_after_the_other_computes(colocated: tuple[Path, list[Call]]) -> None:
    _, done = colocated
    park, unpark = {"actor.sleep", "critic.sleep"}, {"actor.wake_up", "critic.wake_up"}
    meet = [{"actor.sync_listen"}, {"actor.sync_join", "rollout.sync_join"}]
    send, wake, rest = {"actor.sync_push", "rollout.sync_receive"}, {"rollout.wake_up.kv_cache"}, {"rollout.sleep"}
    turn = [park, {"rollout.wake_up.weights"}, send, wake, {"rollout.generate"}, rest, unpark]
    speeds = [*[{"actor.measure"}, {"critic.measure"}] * 3, *[{"rollout.measure"}] * 7, *[send] * 3]
    measured = [*turn[:2], *meet, send, wake, *speeds, rest, unpark]
    learn = [{"actor.logprobs"}, {"critic.values"}, *[{"actor.train_step"}, {"critic.train_step"}] * 4]
    start = [{"rollout.start"}, {"rollout.sleep"}, {"actor.start", "critic.start"}]
    evaluate, step = turn, [*turn, *learn]
    first = [*turn, *learn[:2], {"actor.self_check"}, *learn[2:]]
    stages = [*start, *measured, *turn, *first, *step, *evaluate, {"actor.save", "critic.save"}, {"actor.export"}]
    # `memory` only looks, during the others' calls, whenever a report is due.
    left = iter(in_one_piece([call for call in done if call.method not in ("shutdown", "memory")]))
    before = 0
    for stage in stages:
        together = list(itertools.islice(left, len(stage)))
        assert {str(call) for call in together} == stage
        assert min(call.begin for call in together) > before  # earlier calls have been answered
        before = max(call.end for call in together)
    assert list(left) == []
