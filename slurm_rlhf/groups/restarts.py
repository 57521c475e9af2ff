"""Says in which state a role or an engine is, and what may start again, how often and where. Pure.

A unit is `starting`, then `up`; or it is `lost`, and starts again or has `ended` for good. Whoever loses it says why.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from slurm_rlhf.config.roles import ROLES
from slurm_rlhf.errors import PlacementError
from slurm_rlhf.placement.replacement import passed_over

INCIDENT_S = 60.0
"""Engines of a node that are lost within this time are one loss of the node."""
TWICE = 2
"""Failures of ranks on one node after which another node is taken, if there is one."""

# These do not come from the program: a process that is killed twice in the same step may be killed by chance.
_FROM_OUTSIDE = re.compile(r"killed by SIG(KILL|TERM)\b|ended: (Killed|Terminated)\b|\bis lost: ")
_CHANGING = re.compile(r"0x[0-9a-f]+|\d+")


State = Literal["starting", "up", "lost", "ended"]


@dataclass(frozen=True, slots=True)
class Unit:
    """Describes a role, or one of its engines."""

    role: str
    nodes: tuple[str, ...] = ()  # where its processes are, or may have failed; empty: not known
    state: State = "starting"
    life: int = 0  # number of starts after the first: what an earlier life has left to say does not count
    began: float = 0.0  # time of the present start
    asked: bool = False  # its processes were asked to load the model, or to end if it is lost
    version: int | None = None  # version of the policy from which it takes part; None: it gets no prompts
    lost_at: float = 0.0
    why: str = ""  # reason why it is lost, or has ended
    silent: bool = False  # True: it is lost because nothing was heard of it, so that its node may be gone

    @property
    def node(self) -> str:
        """Return where an engine is, or was: on one node."""
        return self.nodes[0]

    @property
    def gone(self) -> bool:
        """Tell whether it is lost, and may have ended for good."""
        return self.state in ("lost", "ended")

    def up(self, version: int | None = None) -> Unit:
        """Return the unit whose processes all have started."""
        return replace(self, state="up", version=version)

    def lost(self, why: str, now: float, silent: bool = False) -> Unit:
        """Return the unit that lost a process; what is left of it is still to be ended."""
        return replace(self, state="lost", why=why, lost_at=now, silent=silent, version=None, asked=False)

    def again(self, now: float, *nodes: str) -> Unit:
        """Return the unit whose processes were started once more."""
        return replace(self, state="starting", nodes=nodes, life=self.life + 1, began=now, asked=False)

    def ended(self, why: str) -> Unit:
        """Return the unit that is left out for good."""
        return replace(self, state="ended", why=why)


def roles_again(roles: Iterable[str], failed: str, engines_too: bool) -> tuple[str, ...]:
    """List those of `roles` that start again together because `failed` broke the run.

    Ranks of trainers need each other, so all of them do. Engines start again alone (`next_place`) where their launcher
    can do that; they start with the trainers if an engine broke the run all the same, or with `engines_too`.
    """
    with_engines = engines_too or ROLES[failed].kind == "engine"
    return tuple(role for role in roles if with_engines or ROLES[role].kind != "engine")


@dataclass(frozen=True, slots=True)
class Loss:
    """Says that an engine was lost on a node, at `at` seconds of some clock."""

    engine: int
    node: str
    at: float


def next_place(
    engine: int,
    home: str,
    losses: Sequence[Loss],
    spares: Collection[str],
    home_gone: bool,
    most: int,
    unfit: Mapping[str, str] | None = None,
) -> str:
    """Choose the node where `engine`, which has just been lost on `home`, starts again. Raises PlacementError.

    `losses`: all losses of the run so far, in their order. `spares`: nodes without ranks. `home_gone`: nothing is
    heard from that node. `most`: train.max_engine_restarts, the starts that an engine gets after its first; a node that
    was lost more often gets no further engine. `unfit`: spares that get none either, and why.
    """
    died = sum(loss.engine == engine for loss in losses)
    if died > most:
        raise PlacementError(f"it died {died} times (train.max_engine_restarts = {most})")
    bad = {node for node in {loss.node for loss in losses} if incidents(losses, node) > most}
    good = [node for node in spares if node not in {*bad, *(unfit or {})}]
    if home not in bad and not (home_gone and good):
        return home
    if good:
        return good[0]
    why = f"its node {home} lost engines {incidents(losses, home)} times (train.max_engine_restarts = {most})"
    passed = {node: said for node, said in (unfit or {}).items() if node in spares}
    raise PlacementError(f"{why}; {passed_over(passed)}" if passed else why)


def incidents(losses: Sequence[Loss], node: str) -> int:
    """Count how often a node lost engines; several within a minute are one time."""
    count, last = 0, -INCIDENT_S
    for loss in losses:
        if loss.node == node:
            count += loss.at - last >= INCIDENT_S or count == 0
            last = loss.at
    return count


@dataclass(frozen=True, slots=True)
class RunFailure:
    """Describes what broke the run once."""

    step: int  # step in which it happened
    text: str  # message of the error
    nodes: tuple[str, ...] = ()  # nodes where the role may have died

    @property
    def head(self) -> str:
        """Return the first line of the text."""
        return self.text.partition("\n")[0]

    def repeats(self, other: RunFailure) -> bool:
        """Tell whether this is the same failure in the same step, by the words alone; numbers change."""
        same = _CHANGING.sub("#", self.text) == _CHANGING.sub("#", other.text)
        return self.step == other.step and same and not _FROM_OUTSIDE.search(self.head)


def refusal(failures: Sequence[RunFailure], most: int) -> str:
    """Say why the run ends after the last of `failures` and is not restarted; empty: it is."""
    if len(failures) > most:
        listed = "".join(f"\n  {number}. step {one.step}: {one.head}" for number, one in enumerate(failures, 1))
        return f"train.max_restarts = {most} restarts are used up. What failed:{listed}"
    if len(failures) > 1 and failures[-1].repeats(failures[-2]):
        return f"the same failure came twice in a row in step {failures[-1].step}: a restart would meet it again"
    return ""


def offenders(failures: Sequence[RunFailure]) -> set[str]:
    """List the nodes on which ranks died `TWICE` or more, where it is known which node it was."""
    counted = Counter(failure.nodes[0] for failure in failures if len(failure.nodes) == 1)
    return {node for node, count in counted.items() if count >= TWICE}
