"""Waits for the calls of a weight transfer, in which an engine may be lost while the others wait for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from slurm_rlhf.errors import RemoteError
from slurm_rlhf.records import SyncReport
from slurm_rlhf.wire import timeouts
from slurm_rlhf.wire.calls import ActorCalls
from slurm_rlhf.wire.handles import EngineHandle, RoleHandle

LEADER = 0  # the actor rank that leads an update; it is rank 0 of the sync group

Call = Future[Any]


class EngineLost(Exception):
    """Says that an engine was lost during a transfer, and that all others have let go of it."""


@dataclass(slots=True)
class _Transfer:
    """Holds the calls of a transfer, and what has become of its members."""

    rollout: EngineHandle
    actor: Sequence[Call]
    engines: Mapping[Call, int]
    lost: dict[int, BaseException] = field(default_factory=dict)
    given_up: set[int] = field(default_factory=set)
    failed: bool = False  # a call, and it is not known that an engine was lost
    aborts: int = 0
    broken_at: float = 0.0  # the first call failed, or reported that the transfer was cut off

    def take(self, call: Call) -> bool:
        """Note the end of a call; False: it failed for a reason that is nothing to do with the others."""
        error = call.exception()
        if error is None:
            found = call.result()
            broken = isinstance(found, SyncReport) and bool(found.broken)
        else:
            broken, engine = True, self.engines.get(call)
            if engine is not None and self.rollout.goes_on_without(engine, error):
                self.lost[engine] = error
            elif not isinstance(error, RemoteError) or error.user_error:
                return False
            else:
                self.failed = True
        if broken and not self.broken_at:
            self.broken_at = time.monotonic()
        return True


def settle_update(rollout: EngineHandle, actor: Sequence[Call], engines: Mapping[Call, int]) -> None:
    """Wait until the calls of an update are answered, or one has failed for another reason than an engine's end.

    Engines that stand still, where every other member has let go of an update that broke off, are given up. Raises
    EngineLost.
    """
    _settle(_Transfer(rollout, actor, engines), _give_up_late)


def settle_forming(
    rollout: EngineHandle, leader: RoleHandle[ActorCalls], actor: Sequence[Call], engines: Mapping[Call, int]
) -> None:
    """Wait for the calls that form a group, in the same way; the others do not wait for an engine that is lost."""
    _settle(_Transfer(rollout, actor, engines), partial(_end_forming, leader))


def _settle(transfer: _Transfer, urge: Callable[[_Transfer, float], None]) -> None:
    """Wait; `urge` hastens those that are left, so many seconds after the first has failed or broken off."""
    pending = {*transfer.actor, *transfer.engines}
    while pending:
        done, pending = wait(pending, timeouts.POLL_S if transfer.broken_at else None, FIRST_COMPLETED)
        if not all(transfer.take(call) for call in done):
            return
        if transfer.broken_at:
            waited = time.monotonic() - transfer.broken_at
            if transfer.failed and not transfer.lost and waited > timeouts.TRANSFER_DEATH_S:
                return
            urge(transfer, waited)
    if transfer.lost:
        raise EngineLost("; ".join(str(error) for error in transfer.lost.values()))


def _give_up_late(transfer: _Transfer, waited: float) -> None:
    if waited < timeouts.TRANSFER_SLOW_S or not all(call.done() for call in transfer.actor):
        return
    for call, engine in transfer.engines.items():
        if not call.done() and engine not in transfer.given_up:
            transfer.given_up.add(engine)
            transfer.rollout.give_up(engine, f"it stands still in a weight update that broke off {waited:.0f} s ago")


def _end_forming(leader: RoleHandle[ActorCalls], transfer: _Transfer, waited: float) -> None:
    """Let the members give the group up, again and again: the leader may not have begun to form it."""
    if transfer.lost and waited > transfer.aborts * timeouts.TRANSFER_ABORT_S:
        transfer.aborts += 1
        leader.call(LEADER, ActorCalls.sync_abort)
