"""A run that hangs four times, in four places: each is named with its stack; it goes on, or ends."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from campaign.workload import PLUGIN
from held_runs import ENGINE
from holds import HOLD, Holds
from patched_ranks import patched_engines
from sums_task import REWARD
from training_runs import metrics, started, summary, workspace
from waiting import scaled

from slurm_rlhf.observe.run_log import read_events

pytestmark = [pytest.mark.engine, pytest.mark.slow]

WORLD = (
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
)
PLACES = ("python", "lock", "engine", "reward-hang")


class Told:
    """What a hang left behind."""

    def __init__(self, directory: Path) -> None:
        self.report = (directory / "report.txt").read_text()
        self.stacks = (directory / "stacks.txt").read_text()
        self.messages = (directory / "messages.txt").read_text()
        self.nodes = (directory / "nodes.txt").read_text()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Told], int, str, Path]:
    """(what was told of each place, exit code, what it printed, run directory). The last hang is not let go."""
    path = tmp_path_factory.mktemp("hangs")
    config = workspace(path)
    holds, told = Holds(config), {}
    (path / "plugin.py").write_text(PLUGIN)
    with patched_engines(path / "patch", ENGINE.format(hold=str(path / HOLD)), ranks=("0",)):
        with started(config, path / "run", *WORLD, f"--train.plugins={path / 'plugin.py'}", warm=True) as run:
            run.wait_for_step(4)
            for place in PLACES:
                known = set((path / "run").glob("hang-*/nodes.txt"))
                holds.hold(place)
                run.wait_for_file("hang-*/nodes.txt", known)
                (found,) = set((path / "run").glob("hang-*/nodes.txt")) - known
                told[place] = Told(found.parent)
                if place != PLACES[-1]:
                    holds.let_go(place)
                    run.wait_for_step(len(metrics(path / "run")) + 2)
            code, output = run.wait()
            run.assert_gone()
    return told, code, output, path / "run"


def test_a_rank_that_never_enters_a_collective_is_named_with_its_line(run) -> None:
    told = run[0]["python"]
    print(told.report)
    line = PLUGIN.splitlines().index("            time.sleep(0.02)") + 1
    assert re.search(
        rf"behind is actor rank 1 on \S+ \(pid \d+, in train_step for \d+ s\): .*policy_loss \(\S*plugin.py:{line}\)",
        told.report,
    )
    assert re.search(r"actor rank 0 waits in \w+", told.report)
    assert re.search(
        r"# actor rank 1 on .*, from its own answer\nThread MainThread .*\n"
        rf'  File ".*plugin.py", line {line} in policy_loss',
        told.stacks,
    )
    assert "# rollout rank 0" in told.stacks
    assert "# conductor" in told.stacks


def test_a_call_into_c_that_holds_the_interpreters_lock_is_named_with_its_line(run) -> None:
    told = run[0]["lock"]
    print(told.report)
    line = PLUGIN.splitlines().index('    libc.close(libc.open(bytes(HOLD / "lock"), os.O_RDONLY))') + 1
    assert re.search(
        r"behind is actor rank 1 .*: a call into C that holds the interpreter's lock, "
        rf"in hold_the_lock \(\S*plugin.py:{line}\)",
        told.report,
    )
    assert f'plugin.py", line {line} in hold_the_lock' in told.stacks
    assert "from its log, while something held the interpreter's lock" in told.stacks


def test_an_engine_in_an_endless_step_is_named(run) -> None:
    told = run[0]["engine"]
    print(told.report)
    assert re.search(
        r"behind is rollout rank 0 .*in generate for \d+ s\): it is in endless_step \(patch/sitecustomize.py:\d+\)",
        told.report,
    )


def test_a_reward_function_that_sleeps_is_named_with_its_line(run) -> None:
    told = run[0]["reward-hang"]
    print(told.report)
    line = REWARD.splitlines().index("        time.sleep(0.02)") + 1
    assert re.search(rf"behind is the reward function, at reward_func \(\S*reward.py:{line}\)", told.report)


def test_the_report_has_messages_and_load_and_says_what_was_not_possible(run) -> None:
    for told in run[0].values():
        assert re.search(r"^\d\d:\d\d:\d\d\.\d{3} actor rank 1: call train_step$", told.messages, re.MULTILINE)
        assert re.search(r"^\S+: load [\d. ]+ on \d+ CPUs, [\d.]+ of [\d.]+ GiB of memory available$", told.nodes)


def test_one_paragraph_each_and_the_run_goes_on_where_it_can(run) -> None:
    _, code, output, path = run
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
