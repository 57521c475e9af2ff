"""How soon a storm's faults were noticed, from what the run has written."""

from __future__ import annotations

import pytest
from campaign.storm import Blow, noticed, words

from slurm_rlhf.observe.events import CHECKPOINT, ENGINE_LOST, RESTART, RunEvent

KILLED = "role actor died: rank 0"
EVENTS = [
    RunEvent(CHECKPOINT, 9.0, 2, "saved in 0.1 s"),
    RunEvent(RESTART, 10.5, 2, "role actor died: rank 0 on n1 (pid 7) was killed by SIGKILL; restart 1 of 3"),
    RunEvent(ENGINE_LOST, 52.0, 5, "engine 1 on n2 is lost: it was not heard from for 12 s"),
    RunEvent(RESTART, 91.0, 9, "role actor died: rank 0 on n1 (pid 9) was killed by SIGKILL; restart 2 of 3"),
]


@pytest.mark.parametrize(
    ("blows", "ends", "seconds"),
    [
        ([Blow("actor", 10.0, KILLED)], [], [0.5]),
        ([Blow("actor", 10.0, KILLED), Blow("slurmctld", 20.0), Blow("node", 40.0, "on n2 is lost")], [], [0.5, 12.0]),
        # One that struck a role which was being ended anyway: the second restart is not its own.
        ([Blow("actor", 20.0, KILLED), Blow("actor", 90.0, KILLED)], [], [None, 1.0]),
        ([Blow("actor", 95.0, KILLED)], [], [None]),
        ([Blow("actor", 90.0, KILLED), Blow("conductor", 93.0, "cut off")], [93.4], [1.0, 0.4]),
    ],
)
def test_a_sign_is_one_of_the_last_fault_that_it_fits(
    blows: list[Blow], ends: list[float], seconds: list[float | None]
) -> None:
    assert noticed(blows, EVENTS, ends) == pytest.approx(seconds)


def test_the_row_tells_median_and_longest() -> None:
    assert words([0.5, None, 12.3, 1.0]) == "3 of 4 faults that hurt were noticed, median 1.0 s, at most 12.3 s"
    assert words([None]) == "none of 1 faults was noticed"
