"""Verdicts on the observations of a fault: detected in time, culprit named, recovered, metrics equal, nothing left."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from campaign.faults import BORNE, HURTS, PHASES, START, STOPS, Fault
from slurm_rlhf.config.roles import ROLLOUT

RECOVERED: Final = "recovered in place"
REQUEUED: Final = "ended cleanly, requeued by Slurm, went on"
RESUMED: Final = "ended cleanly, resumed by the same command"
ENDED: Final = "ended cleanly"
UNDISTURBED: Final = "went on undisturbed"
FAILED: Final = "failed"
UNTIMED: Final = ("time/", "perf/")
"""Beginnings of metrics that a clock measures."""
_RANK, _TORCHRUN = re.compile(r"\b(\w+) rank (\d+)\b"), re.compile(r"\btorchrun of (\w+)\b")
_DIED = re.compile(r"\brole (\w+) died(?:: rank (\d+)\b)?")
_LOST_ENGINE = re.compile(r"\bengine (\d+) on \S+ is lost\b")
_LISTED_BEFORE = re.compile(r"^ *\d+\. step \d+: .*\n(?= *\d+\. step \d+: )", re.MULTILINE)


@dataclass(slots=True)
class Observation:
    """Holds what was seen of one fault."""

    hit_phase: str = ""  # as the run reported it when the fault struck
    hit_step: int = 0  # steps that were done by then
    printed: int = 0  # characters, before the fault
    pid: int = 0  # the process that was hit
    nodes: tuple[str, ...] = ()  # nodes that were hit
    checkpoint: int = 0  # the newest whole one by then
    detected_s: float | None = None  # from the fault to the first sign that the run gives of it
    ended_s: float | None = None  # from the fault to the end of the conductor; None: it went on
    exit_code: int | None = None
    went_on: bool = False  # it did steps after the fault in the same session, or was done
    requeued: bool = False  # Slurm started its job again
    resumed: bool | None = None  # the same command went on; None: it was not tried
    resumed_at: int = 0  # the step that it went on from
    innocents: list[str] = field(default_factory=list)  # processes that the run calls dead, though nobody hit them
    stated: str = ""  # output, events, status and what the next start said
    traceback: bool = False  # the terminal showed one
    orphans: list[str] = field(default_factory=list)  # processes
    shared_memory: list[str] = field(default_factory=list)  # files in /dev/shm
    locks: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)  # finished work that is gone
    unequal: list[str] = field(default_factory=list)  # metrics that differ from the calm run's
    compared: int = 0  # steps
    error: str = ""  # the harness failed: the fault could not be tried


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table."""

    fault: str
    kind: str
    target: str
    phase: str
    hit: str
    detected_s: float | None
    limit_s: float  # the limit of `detected_s`
    culprit: bool | None  # None: there is nothing to name
    said: str
    outcome: str
    equal: bool | None  # None: no step to compare
    compared: int
    left: list[str]
    problems: list[str]

    @property
    def good(self) -> bool:
        return not self.problems


def judge(fault: Fault, seen: Observation) -> Row:
    """Judge one fault."""
    # A run that is asked to stop while it exports its model finishes that, and is done.
    if fault.does == STOPS and seen.went_on and seen.ended_s is None:
        fault = replace(fault, does=BORNE)
    quotes = [quote(one, seen.stated) for one in patterns(fault, seen)]
    said = " / ".join(dict.fromkeys(filter(None, quotes)))
    culprit = None if fault.does == BORNE else all(quotes) and not seen.innocents
    outcome = outcome_of(fault, seen)
    left = [*seen.orphans, *seen.shared_memory, *seen.locks]
    problems = list(_problems(fault, seen, culprit, outcome))
    problems += [f"left behind: {one}" for one in left]
    hit = f"{seen.hit_phase or 'between phases'}, after step {seen.hit_step}"
    equal = None if not seen.compared else not seen.unequal
    return Row(
        *(fault.name, fault.kind, fault.target, fault.phase, hit, _round(seen.detected_s)),
        *(fault.limit_s, culprit, said, outcome),
        *(equal, seen.compared, left, problems),
    )


def patterns(fault: Fault, seen: Observation) -> list[str]:
    """Return the regular expressions that name the culprits, one for each node that was hit."""
    says = fault.says.replace("{pid}", str(seen.pid))
    return [says.replace("{node}", re.escape(node)) for node in seen.nodes or ("",)]


def innocents(fault: Fault, stated: str) -> list[str]:
    """List who has died by them, where the fault was to hit others; empty where it hits a node, or no rank at all.

    While roles start, a rank may be gone before its number is known: then the role is enough.
    """
    if "node of " in fault.target:
        return []  # all of its ranks are hit
    ranks = {(role, number) for role, number in _RANK.findall(fault.target)}
    roles = {role for role, _ in ranks} | {*_TORCHRUN.findall(fault.target)}
    found = [(role, number) for role, number in _DIED.findall(stated)]
    found += [(ROLLOUT, number) for number in _LOST_ENGINE.findall(stated)]
    wrong = [
        f"{role} rank {number}" if number else role
        for role, number in found
        if role not in roles or (number and fault.phase != START and (role, number) not in ranks and ranks)
    ]
    return list(dict.fromkeys(wrong)) if roles else []


def newest_failure(stated: str) -> str:
    """Leave out what a run that is not restarted any more lists of its earlier failures: other faults' (`refusal`)."""
    return _LISTED_BEFORE.sub("", stated)


def quote(expression: str, stated: str) -> str:
    """Return the line that names the culprit, shortened; empty: none does."""
    if not expression or (match := re.search(expression, stated)) is None:
        return ""
    begin, end = stated.rfind("\n", 0, match.start()) + 1, stated.find("\n", match.end())
    return stated[begin : end if end >= 0 else len(stated)].strip()[:300]


def outcome_of(fault: Fault, seen: Observation) -> str:
    """Classify how it went on."""
    if seen.error:
        return FAILED
    if seen.ended_s is None:
        went = REQUEUED if seen.requeued else UNDISTURBED if fault.does == BORNE else RECOVERED
        return went if seen.went_on else FAILED
    if seen.resumed is None:
        return ENDED if fault.apart else FAILED
    return RESUMED if seen.resumed else FAILED


def _problems(fault: Fault, seen: Observation, culprit: bool | None, outcome: str) -> Sequence[str]:
    found = []
    if seen.error:
        found.append(seen.error)
    if outcome == FAILED and not seen.error:
        found.append("the run neither went on nor could the same command go on")
    if fault.does == BORNE and seen.ended_s is not None:
        found.append("the run ended, though it could have gone on")
    if fault.phase in PHASES and seen.hit_phase not in PHASES[fault.phase] and not seen.error:
        found.append(f"it came too late or too early: in {seen.hit_phase or 'no phase'}, not in {fault.phase}")
    if fault.does in (HURTS, STOPS) and seen.detected_s is None and not seen.error:
        found.append("not detected")
    if fault.does in (HURTS, STOPS) and seen.detected_s is not None and seen.detected_s > fault.limit_s:
        found.append(f"detected after {seen.detected_s:.0f} s, which is more than {fault.limit_s:g} s")
    if culprit is False and not seen.innocents and not seen.error:
        found.append("the culprit is not named")
    found += [f"named, though nobody hit it: {one}" for one in seen.innocents]
    if seen.traceback:
        found.append("a traceback on the terminal")
    if (seen.resumed or seen.requeued) and seen.resumed_at < seen.checkpoint:
        found.append(f"went on at step {seen.resumed_at}, before the checkpoint of step {seen.checkpoint}")
    found += seen.lost
    if seen.unequal:
        found.append(f"other metrics than the calm run: {', '.join(seen.unequal[:3])}")
    return found


def _round(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 2)


def unequal(rows: Sequence[Mapping[str, Any]], calm: Sequence[Mapping[str, Any]]) -> tuple[int, list[str]]:
    """Compare rows with the calm run's of the same steps, bit for bit but for what a clock measures.

    Returns how many were compared, and what differs.
    """
    known = {row["step"]: row for row in calm}
    shared = [row for row in rows if row["step"] in known]
    found = []
    for row in shared:
        other = known[row["step"]]
        names = [name for name in sorted(row.keys() | other.keys()) if not name.startswith(UNTIMED)]
        found += [f"{name} of step {row['step']}" for name in names if _text(row, name) != _text(other, name)]
    return len(shared), found


def _text(row: Mapping[str, Any], name: str) -> str:
    return json.dumps(row.get(name))
