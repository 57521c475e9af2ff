"""Ranks of whole runs that kill themselves, once each, when they take a call for the n-th time."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import astuple, dataclass
from pathlib import Path

from patched_ranks import patched

_SOURCE = """
import json, os, signal, sys

role = next((word.partition("=")[2] for word in sys.orig_argv if word.startswith("--role=")), "")
if role and "LOCAL_RANK" in os.environ:
    from slurm_rlhf.control.client import ControlClient

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
