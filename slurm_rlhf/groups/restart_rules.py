"""Decides where an engine that died starts again, by pure functions over what died so far."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from slurm_rlhf.placement.replacement import passed_over

INCIDENT_S = 60.0
"""Engines of a node that are lost within this time are one loss of the node."""


@dataclass(frozen=True, slots=True)
class Loss:
    """Says that an engine was lost on a node, at `at` seconds of some clock."""

    engine: int
    node: str
    at: float


@dataclass(frozen=True, slots=True)
class RestartPlace:
    """Says where an engine starts again; `node` None: nowhere, for the reason `why`."""

    node: str | None
    why: str = ""


def next_place(
    engine: int,
    home: str,
    losses: Sequence[Loss],
    spares: Collection[str],
    home_gone: bool,
    most: int,
    unfit: Mapping[str, str] | None = None,
) -> RestartPlace:
    """Choose where `engine`, which has just been lost on `home`, starts again.

    `losses`: all of the run, in their order, this one included. `spares`: nodes without ranks. `home_gone`: nothing is
    heard from that node. `most`: train.max_engine_restarts, the starts that an engine gets after its first; a node that
    was lost more often gets no further engine. `unfit`: spares that get none either, and why.
    """
    died = sum(loss.engine == engine for loss in losses)
    if died > most:
        return RestartPlace(None, f"it died {died} times (train.max_engine_restarts = {most})")
    bad = {node for node in {loss.node for loss in losses} if incidents(losses, node) > most}
    good = [node for node in spares if node not in {*bad, *(unfit or {})}]
    if home not in bad and not (home_gone and good):
        return RestartPlace(home)
    if good:
        return RestartPlace(good[0])
    why = f"its node {home} lost engines {incidents(losses, home)} times (train.max_engine_restarts = {most})"
    passed = {node: said for node, said in (unfit or {}).items() if node in spares}
    return RestartPlace(None, f"{why}; {passed_over(passed)}" if passed else why)


def incidents(losses: Sequence[Loss], node: str) -> int:
    """Count how often a node lost engines; several within a minute are one time."""
    count, last = 0, -INCIDENT_S
    for loss in losses:
        if loss.node == node:
            count += loss.at - last >= INCIDENT_S or count == 0
            last = loss.at
    return count
