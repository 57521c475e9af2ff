"""The fault campaign without its runs: the table of faults, and what observations mean."""

from __future__ import annotations

import dataclasses

import pytest
from campaign.faults import BORNE, STOPS, Fault, all_faults
from campaign.injection import INJECT, function_of
from campaign.verdicts import (
    ENDED,
    FAILED,
    RECOVERED,
    RESUMED,
    UNDISTURBED,
    Observation,
    innocents,
    judge,
    newest_failure,
    unequal,
)

from slurm_rlhf.groups.restarts import RunFailure, refusal

KILL = Fault("SIGKILL", "actor rank 1", "train", says=r"role actor died: rank 1\b", limit_s=10)
CALM = Fault("clock jump +1 h", "all of the run", "any", does=BORNE)


def seen(**changes: object) -> Observation:
    """A rank that was killed, named, and whose run went on from its checkpoint."""
    usual = Observation(
        hit_phase="update",
        hit_step=5,
        checkpoint=4,
        detected_s=1.2,
        ended_s=2.0,
        exit_code=1,
        resumed=True,
        resumed_at=4,
        stated="start\nslurm-rlhf: error: role actor died: rank 1 on n1 (pid 7) was killed by SIGKILL\nlog",
        compared=2,
    )
    return dataclasses.replace(usual, **changes)  # type: ignore[arg-type]


def test_all_as_it_should_be() -> None:
    row = judge(KILL, seen())
    assert row.good
    assert row.culprit
    assert row.said == "slurm-rlhf: error: role actor died: rank 1 on n1 (pid 7) was killed by SIGKILL"
    assert (row.outcome, row.equal, row.hit) == (RESUMED, True, "update, after step 5")


@pytest.mark.parametrize(
    "changes, problem",
    [
        ({"stated": "role critic died: rank 1"}, "the culprit is not named"),
        ({"stated": "role actor died: rank 12"}, "the culprit is not named"),
        ({"detected_s": None}, "not detected"),
        ({"ended_s": None, "requeued": True, "went_on": True, "resumed_at": 1}, "went on at step 1, before the"),
        ({"detected_s": 12.0}, "detected after 12 s, which is more than 10 s"),
        ({"resumed": False}, "the run neither went on"),
        ({"resumed": None}, "the run neither went on"),
        ({"resumed_at": 2}, "went on at step 2, before the checkpoint of step 4"),
        ({"orphans": ["process 9 python"]}, "left behind: process 9 python"),
        ({"shared_memory": ["/dev/shm/x"]}, "left behind: /dev/shm/x"),
        ({"locks": ["lock /r/.control/lock"]}, "left behind: lock /r/.control/lock"),
        ({"unequal": ["reward of step 5"]}, "other metrics than the calm run: reward of step 5"),
        ({"traceback": True}, "a traceback on the terminal"),
        ({"lost": ["the exported model is not"]}, "the exported model is not"),
        ({"hit_phase": "sync"}, "it came too late or too early: in sync, not in train"),
        ({"hit_phase": ""}, "it came too late or too early: in no phase, not in train"),
        ({"innocents": ["critic rank 0"]}, "named, though nobody hit it: critic rank 0"),
        ({"error": "RunError: actor rank 1 is not there"}, "actor rank 1 is not there"),
    ],
)
def test_each_thing_that_can_be_wrong_is_reported(changes: dict[str, object], problem: str) -> None:
    row = judge(KILL, seen(**changes))
    assert not row.good
    assert any(problem in text for text in row.problems), row.problems


PAIR = Fault("SIGKILL, one after the other", "actor rank 1, critic rank 0", "train")
TORCHRUN = Fault("SIGKILL", "torchrun of actor", "train")
BOTH = "role actor died: rank 1 on n (pid 7) was killed by SIGKILL; role critic died: rank 0 on n (pid 8) was killed"


@pytest.mark.parametrize(
    "fault, stated, named",
    [
        (KILL, "error: role actor died: rank 1 on n1 (pid 7) was killed", []),
        (dataclasses.replace(KILL, target="node of actor rank 1"), "role critic died: rank 0 on n1 (pid 7)", []),
        (KILL, "role actor died: rank 0 on n1 (pid 7) ended", ["actor rank 0"]),
        (KILL, BOTH, ["critic rank 0"]),
        (PAIR, BOTH, []),
        (PAIR, f"{BOTH}\nengine 0 on n is lost: silent", ["rollout rank 0"]),
        (TORCHRUN, "role actor died: its process group on n was killed; gone: rank 0 (pid 3)", []),
        (TORCHRUN, "role actor died: rank 0 on n", []),
        (TORCHRUN, "role critic died: its process group", ["critic"]),
        (dataclasses.replace(KILL, phase="start"), "role actor died: rank 0 on n", []),
        (dataclasses.replace(KILL, phase="start"), "role critic died: rank 0 on n", ["critic rank 0"]),
        (Fault("deleted", "run directory", "train"), BOTH, []),
    ],
)
def test_nobody_is_named_whom_the_fault_did_not_hit(fault: Fault, stated: str, named: list[str]) -> None:
    assert innocents(fault, stated) == named


def test_how_it_went_on() -> None:
    on = {"ended_s": None, "exit_code": None, "resumed": None, "went_on": True}
    assert judge(KILL, seen(**on)).outcome == RECOVERED
    assert judge(CALM, seen(**on)).outcome == UNDISTURBED
    assert judge(KILL, seen(**on | {"went_on": False})).outcome == FAILED
    assert judge(dataclasses.replace(KILL, apart=True), seen(resumed=None)).outcome == ENDED
    assert judge(CALM, seen()).problems == ["the run ended, though it could have gone on"]
    assert judge(CALM, seen(**on)).culprit is None


def test_a_fault_that_breaks_nothing() -> None:
    on = {"ended_s": None, "exit_code": 0, "resumed": None, "went_on": True, "detected_s": None, "stated": ""}
    assert judge(KILL, seen(**on)).problems == ["not detected", "the culprit is not named"]
    stop = dataclasses.replace(KILL, phase="export", does=STOPS)
    assert judge(stop, seen(**on, hit_phase="export")).problems == []


def test_metrics_are_compared_bit_for_bit_but_for_times() -> None:
    calm = [{"step": 1, "reward": 0.1, "time/step": 1.0}, {"step": 2, "reward": 0.2}]
    assert unequal([{"step": 1, "reward": 0.1, "time/step": 9.0}], calm) == (1, [])
    assert unequal([{"step": 2, "reward": 0.2 + 1e-16}], calm) == (1, ["reward of step 2"])
    assert unequal([{"step": 2}], calm) == (1, ["reward of step 2"])
    assert unequal([{"step": 3, "reward": 5.0}], calm) == (0, [])


def test_of_two_nodes_that_were_hit_both_have_to_be_named() -> None:
    fault = Fault("crash, one after the other", "two nodes", "train", says=r"rank \d on {node}\b", needs="slurm")
    first, second = "restart: rank 1 on n2 is lost", "restart: rank 1 on n3 is lost"
    row = judge(fault, seen(nodes=("n2", "n3"), stated=f"{first}\nlog\n{second}"))
    assert (row.good, row.culprit, row.said) == (True, True, f"{first} / {second}")
    assert "the culprit is not named" in judge(fault, seen(nodes=("n2", "n3"), stated=first)).problems


def test_of_a_list_of_failures_the_newest_is_this_faults() -> None:
    failures = [
        RunFailure(3, "role reference died: rank 0 was killed"),
        RunFailure(9, "role actor died: rank 1 was killed"),
    ]
    stated = f"error: {refusal(failures, 1)}\n  the run directory is there"
    fault = Fault("SIGKILL", "actor rank 1", "generate", says="role actor died")
    assert innocents(fault, stated) == ["reference rank 0"]
    assert innocents(fault, newest_failure(stated)) == []
    assert newest_failure(stated).count("died") == 1
    assert newest_failure(stated).endswith("\n  the run directory is there")


# --- faults -----------------------------------------------------------------------------------------------------------


LOCAL = [fault for fault in all_faults() if fault.needs != "slurm"]


def test_every_fault_of_this_machine_can_be_done() -> None:
    assert {function_of(fault) for fault in LOCAL} == set(INJECT)
