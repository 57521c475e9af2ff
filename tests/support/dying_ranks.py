"""Ranks of whole runs that kill themselves, once each, when they take a call for the n-th time."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import astuple, dataclass
from pathlib import Path

from patched_ranks import patched
from training_runs import started, summary

from slurm_rlhf.observe.run_log import read_events

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


@dataclass(frozen=True, slots=True)
class Death:
    role: str
    rank: int
    method: str
    count: int  # of the calls that its process has taken, from 1


def dying(directory: Path, deaths: Sequence[Death]) -> AbstractContextManager[None]:
    """Ranks of runs that start within it die so: one process each, whichever comes there first."""
    listed = json.dumps([astuple(death) for death in deaths])
    return patched(directory, _SOURCE, TEST_DEATHS=listed, TEST_DEAD=str(directory / "dead"))


def trainers_die(config: Path, run_dir: Path, words: Sequence[str], deaths: Sequence[Death]) -> None:
    """A whole run of four steps in which an actor dies, then a critic: both times the trainers start again."""
    with dying(run_dir.with_suffix(".deaths"), deaths), started(config, run_dir, *words, warm=True) as run:
        run.wait_for_file("logs/rollout.*.1.log")
        engines, actors = sorted(run.workers("rollout")), sorted(run.workers("actor"))
        run.wait_for_file("eval/step_000003.json")
        assert sorted(run.workers("rollout")) == engines
        assert not set(run.workers("actor")) & set(actors)
        code, output = run.wait()
        run.assert_gone()
    assert code == 0, output
    assert "restart 1 of 3 in this job: actor, critic, reference start again; the engines go on" in output
    assert "there is no checkpoint yet: the run begins anew, with the initial weights" in output
    assert "restart 2 of 3 in this job" in output
    assert "step_000002 at step 2/4" in output
    found = [event.text for event in read_events(run_dir / "events.jsonl") if event.event == "restart"]
    died = [re.match(r"role (\w+) died: rank (\d) on \S+ \(pid \d+\) was killed by SIGKILL", text) for text in found]
    assert [one and one[1] for one in died] == ["actor", "critic"]
    assert [why in text for why, text in zip(summary(run_dir)["restarts"], found, strict=True)] == [True, True]
