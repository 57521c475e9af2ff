"""Runs that cannot go on and how they end, trainers that start again, and runs that hang."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace

import pytest
from campaign.workload import PLUGIN
from holds import HOLD, Holds
from patched_ranks import patched, patched_engines
from sums_task import REWARD
from training_runs import finished, metrics, started, summary, timeless, train, workspace
from waiting import scaled
from whole_run import SMALL, WORLD, Whole

from slurm_rlhf.observe.run_log import read_events

pytestmark = [pytest.mark.engine, pytest.mark.slow]

ALONE = ("--algo.kl.init_coef=0",)
"""No reference: what fails is not about it."""
ENDLESS = ("--train.max_steps=1000", "--train.num_episodes=1000")

RAISES_LATER = """
def reward_func(queries, prompts, labels, step, **kwargs):
    if step > 2:
        return [1.0 / (step - step) for _ in queries]
    return [1.0 for _ in queries]
"""


# --- ranks that kill themselves when they take a call for the n-th time -----------------------------------------------


_SOURCE = """
import json, os, signal, sys

role = next((word.partition("=")[2] for word in sys.orig_argv if word.startswith("--role=")), "")
if role and "LOCAL_RANK" in os.environ:
    from slurm_rlhf.wire.client import ControlClient

    me = [role, int(os.environ.get("RANK", "-1"))]
    deaths = [death for death in json.loads(os.environ["TEST_DEATHS"]) if death[:2] == me]
    receive, taken = ControlClient.receive, {}

    def dying_receive(self, *args):
        request = receive(self, *args)
        if request is not None:
            taken[request.method] = taken.get(request.method, 0) + 1
            for number, (_, _, method, count) in enumerate(deaths):
                if (method, count) == (request.method, taken.get(method)):
                    try:
                        os.close(os.open(f"{os.environ['TEST_DEAD']}.{role}.{number}", os.O_CREAT | os.O_EXCL))
                    except FileExistsError:
                        continue
                    os.kill(os.getpid(), signal.SIGKILL)
        return request

    ControlClient.receive = dying_receive
"""


Death = tuple[str, int, str, int]
"""Role, rank, method, and the number of the call among those that its process has taken, from 1."""


def dying(directory: Path, deaths: Sequence[Death]) -> AbstractContextManager[None]:
    """Ranks of runs that start within it die so: one process each, whichever comes there first."""
    return patched(directory, _SOURCE, TEST_DEATHS=json.dumps(deaths), TEST_DEAD=str(directory / "dead"))


# --- the tests --------------------------------------------------------------------------------------------------------


def test_a_reward_function_that_raises_costs_no_step_and_ctrl_c_ends_what_goes_on(tmp_path: Path) -> None:
    config = workspace(tmp_path, RAISES_LATER)
    code, output = train(config, tmp_path / "run", *ALONE, "--ckpt.save_steps=0", warm=True)
    assert code == 2
    assert "Traceback" not in output
    assert "ZeroDivisionError" in output
    assert "reward.py" in output
    assert "reward.py:4" in output
    assert f"(traceback and what it printed: {tmp_path / 'run' / 'logs' / 'reward.log'})" in output
    assert "the steps up to 2 are saved: the same command goes on from there" in output
    log = next((tmp_path / "run" / "logs").glob("conductor.*.log")).read_text()
    assert "Traceback" in log
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "failed"
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_000002"]
    (tmp_path / "reward.py").write_text(
        "def reward_func(queries, prompts, labels, **kwargs):\n    print('so many words')\n"
        "    return [0.0] * len(queries)\n"
    )
    with started(config, tmp_path / "run", *ALONE, *ENDLESS, warm=True) as run:
        run.wait_for_step(3)
        run.process.send_signal(signal.SIGINT)  # Ctrl-C ends what the run has started
        code, output = run.wait()
    assert code == 130, output
    assert "step_000002" in output  # the step that it went on from
    assert "loading actor, critic; starting 1 engines" in output
    assert re.search(r"^actor is ready after \d+ s$", output, re.MULTILINE)
    assert re.search(r"^critic is ready after \d+ s$", output, re.MULTILINE)
    assert "so many words" not in output
    printed = (tmp_path / "run" / "logs" / "reward.log").read_text()
    assert "ZeroDivisionError" in printed
    assert printed.endswith("so many words\n")
    assert "Traceback" not in output
    assert "press it again to end it at once" in output
    saved = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert saved["status"] == "stopped"
    assert f"stopped by Ctrl-C; saved at step {saved['steps']}/" in output
    assert (tmp_path / "run" / "checkpoints" / f"step_{saved['steps']:06d}").is_dir()


def test_a_killed_rank_ends_the_run_and_is_named(config: Path) -> None:
    precision = ("--ds.param_dtype=bf16", "--ds.zero_stage=0")
    calm = ("--train.max_restarts=0",)
    with started(config, config.parent / "killed", *precision, *ALONE, *ENDLESS, *calm, warm=True) as run:
        run.wait_for_step(1)
        worker = run.worker("critic")
        os.kill(worker, signal.SIGKILL)
        code, output = run.wait()
    assert code == 1
    # Weights that are fp32 under autocast went, rounded, to a bf16 engine.
    assert metrics(config.parent / "killed")[0]["rollout_logprob_diff"] < 0.05
    assert re.search(rf"role critic died: rank \d on \S+ \(pid {worker}\) was killed by SIGKILL", output)
    assert "Traceback" not in output


# --- run restarts -----------------------------------------------------------------------------------------------------


def test_trainers_that_die_start_again_with_the_engines(whole_run: Whole) -> None:
    """An actor's rank dies in the first update, with no checkpoint to go back to; the critic in the forward of step 3.
    The engines live through both, and the numbers are those of the undisturbed run.
    """
    deaths = [("actor", 1, "train_step", 3), ("critic", 0, "values", 3)]
    run_dir = whole_run.config.parent / "restarted"
    with dying(run_dir.with_suffix(".deaths"), deaths), started(whole_run.config, run_dir, *WORLD, warm=True) as run:
        run.wait_for_file("logs/rollout.*.1.log")
        engines, actors = sorted(run.workers("rollout")), sorted(run.workers("actor"))
        run.wait_for_file("eval/step_000003.json")
        assert sorted(run.workers("rollout")) == engines
        assert not set(run.workers("actor")) & set(actors)
        code, output = run.wait()
    assert code == 0, output
    assert "restart 1 of 3 in this job: actor, critic, reference start again; the engines go on" in output
    assert "there is no checkpoint yet: the run begins anew, with the initial weights" in output
    assert "restart 2 of 3 in this job" in output
    assert "step_000002 at step 2/4" in output
    found = [event.text for event in read_events(run_dir / "events.jsonl") if event.event == "restart"]
    died = [re.match(r"role (\w+) died: rank (\d) on \S+ \(pid \d+\) was killed by SIGKILL", text) for text in found]
    assert [one and one[1] for one in died] == ["actor", "critic"]
    assert [why in text for why, text in zip(summary(run_dir)["restarts"], found, strict=True)] == [True, True]
    assert timeless(metrics(run_dir)) == timeless(metrics(whole_run.run_dir))


@pytest.mark.full
def test_an_engine_that_shares_slots_with_trainers_starts_again_with_them(small: Path) -> None:
    """It is killed when it gets the weights for step 2: the numbers are those of roles with slots of their own."""
    run_dir, words = small.parent / "colocated_engine", ("--train.colocate_all=true", "--ckpt.save_steps=1")
    with dying(run_dir.with_suffix(".deaths"), [("rollout", -1, "sync_receive", 3)]):
        output = finished(small.parent / "run.toml", run_dir, *SMALL, *words)
    assert "role rollout died: rank 0 of engine 0" in output
    assert "restart 1 of 3 in this job: actor, critic, rollout start again" in output
    assert "step_000001 at step 1/2" in output
    assert timeless(metrics(run_dir)) == timeless(metrics(small))


# --- run hangs --------------------------------------------------------------------------------------------------------


"""An engine that a test makes hang and lets go again, as `campaign.holds` does with the rest of a run."""

ENGINE = """
import time
from pathlib import Path

def change(module):
    step = module.VllmEngine.step
    def endless_step(engine):
        while (Path({hold!r}) / "engine").exists():
            time.sleep(0.02)
        return step(engine)
    module.VllmEngine.step = endless_step
"""


HELD = (
    "--actor.num_gpus_per_node=2",
    "--algo.advantage.estimator=held_group_norm",
    "--algo.kl.init_coef=0",
    "--train.full_determinism=false",
    "--train.max_steps=1000",
    "--train.num_episodes=1000",
    "--train.self_check=false",
    "--eval.dataset=",
    f"--timeout.hang={round(scaled(5))}",
    f"--timeout.hang_grace={round(scaled(6))}",
    f"--timeout.heartbeat={round(scaled(16))}",
    "--timeout.heartbeat_interval=0.5",
    "--train.on_hang=restart",
    "--reward.workers=0",  # in a worker the function would be late, and no hang
)
PLACES = ("python", "lock", "engine", "reward-hang")


@pytest.fixture(scope="module")
def hung(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, SimpleNamespace], int, str, Path]:
    """(the files that each hang left, exit code, what it printed, run directory). The last hang is not let go."""
    path = tmp_path_factory.mktemp("hangs")
    config = workspace(path)
    holds, stated = Holds(config), {}
    (path / "plugin.py").write_text(PLUGIN)
    with patched_engines(path / "patch", ENGINE.format(hold=str(path / HOLD)), ranks=("0",)):
        with started(config, path / "run", *HELD, f"--train.plugins={path / 'plugin.py'}", warm=True) as run:
            run.wait_for_step(4)
            for place in PLACES:
                known = set((path / "run").glob("hang-*/nodes.txt"))
                holds.hold(place)
                run.wait_for_file("hang-*/nodes.txt", known)
                (found,) = set((path / "run").glob("hang-*/nodes.txt")) - known
                stated[place] = SimpleNamespace(**{file.stem: file.read_text() for file in found.parent.glob("*.txt")})
                if place != PLACES[-1]:
                    holds.let_go(place)
                    run.wait_for_step(len(metrics(path / "run")) + 2)
            code, output = run.wait()
    return stated, code, output, path / "run"


def test_a_rank_that_never_enters_a_collective_is_named_with_its_line(hung) -> None:
    stated = hung[0]["python"]
    line = PLUGIN.splitlines().index("            time.sleep(0.02)") + 1
    assert re.search(
        rf"behind is actor rank 1 on \S+ \(pid \d+, in train_step for \d+ s\): .*policy_loss \(\S*plugin.py:{line}\)",
        stated.report,
    )
    assert re.search(r"actor rank 0 waits in \w+", stated.report)
    assert re.search(
        r"# actor rank 1 on .*, from its own answer\nThread MainThread .*\n"
        rf'  File ".*plugin.py", line {line} in policy_loss',
        stated.stacks,
    )
    assert "# rollout rank 0" in stated.stacks
    assert "# conductor" in stated.stacks


def test_a_call_into_c_that_holds_the_interpreters_lock_is_named_with_its_line(hung) -> None:
    stated = hung[0]["lock"]
    line = PLUGIN.splitlines().index('    libc.close(libc.open(bytes(HOLD / "lock"), os.O_RDONLY))') + 1
    assert re.search(
        r"behind is actor rank 1 .*: a call into C that holds the interpreter's lock, "
        rf"in hold_the_lock \(\S*plugin.py:{line}\)",
        stated.report,
    )
    assert f'plugin.py", line {line} in hold_the_lock' in stated.stacks
    assert "from its log, while something held the interpreter's lock" in stated.stacks


def test_an_engine_in_an_endless_step_is_named(hung) -> None:
    stated = hung[0]["engine"]
    assert re.search(
        r"behind is rollout rank 0 .*in generate for \d+ s\): it is in endless_step \(patch/sitecustomize.py:\d+\)",
        stated.report,
    )


def test_a_reward_function_that_sleeps_is_named_with_its_line(hung) -> None:
    stated = hung[0]["reward-hang"]
    line = REWARD.splitlines().index("        time.sleep(0.02)") + 1
    assert re.search(rf"behind is the reward function, at reward_func \(\S*reward.py:{line}\)", stated.report)


def test_the_report_has_messages_and_load_and_says_what_was_not_possible(hung) -> None:
    for stated in hung[0].values():
        assert re.search(r"^\d\d:\d\d:\d\d\.\d{3} actor rank 1: call train_step$", stated.messages, re.MULTILINE)
        assert re.search(r"^\S+: load [\d. ]+ on \d+ CPUs, [\d.]+ of [\d.]+ GiB of memory available$", stated.nodes)


def test_one_paragraph_each_and_the_run_goes_on_where_it_can(hung) -> None:
    _, code, output, path = hung
    assert len(re.findall(r"^step \d+ hangs in phase \w+: ", output, re.MULTILINE)) == len(PLACES)
    assert len(re.findall(r"^the run goes on: step \d+ moves again$", output, re.MULTILINE)) == len(PLACES) - 1
    # The trainers had nothing to do while the reward slept: all is saved, and the job would be requeued.
    assert code == 1
    done = summary(path)
    hangs = [event for event in read_events(path / "events.jsonl") if event.event == "hang"]
    assert len(hangs) == len(PLACES)  # they stand on the time axis of the report
    assert all(" hangs in phase " in event.text for event in hangs)
    assert (path / "report.html").read_text().count('"event":"hang"') == len(PLACES)
    assert done["status"] == "stopped"
    assert f"stopped by a hang in phase reward of step {done['steps'] + 1}: " in output
    assert f"saved at step {done['steps']}/" in output
    assert "the same command goes on from here" in output
    assert (path / "checkpoints" / f"step_{done['steps']:06d}").is_dir()
    assert "Traceback" not in output
