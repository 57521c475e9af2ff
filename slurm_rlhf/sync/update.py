"""What all members of an update do around the bytes: tell why they failed, and learn why others did.

Rank 0 leads: it waits for everybody's word, judges a failure and publishes the verdict. The others report.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from slurm_rlhf.errors import SyncError
from slurm_rlhf.sync.group import SyncGroup
from slurm_rlhf.sync.transport import TransportFailure

REPORT_TAG = 1
REPORT_BYTES = 8
"""A member's word that it has done its part of an update."""
_SETTLE_S = 0.3


@contextmanager
def leading(group: SyncGroup, version: int) -> Iterator[None]:
    """Rank 0's frame of an update: leaves it when every member has reported.

    Raises SyncError within the group's time-out, naming the member that died, hangs or refused; the group is spent.
    """
    group.check()
    deadline = _Deadline(group, version)
    watch = _Watch(group)
    try:
        yield
        watch.join()
    except TransportFailure as error:
        watch.drop()
        verdict = f"weight update to policy version {version} failed: {group.ended or _judge(group, watch.left)}"
        _give_up(group, verdict)
        raise SyncError(verdict) from error
    except BaseException as error:
        _give_up(group, f"{group.me} gave up the update to policy version {version}: {error}")
        raise
    finally:
        deadline.cancel()


@contextmanager
def following(group: SyncGroup, version: int) -> Iterator[None]:
    """Any other member's frame: reports to rank 0 at its end, and what the block raises.

    Raises SyncError with rank 0's verdict where the connections broke; the group is spent.
    """
    group.check()
    lost: list[TransportFailure] = []
    deadline = _Deadline(group, version)
    try:
        yield
        group.control.send(torch.zeros(REPORT_BYTES, dtype=torch.uint8), 0, REPORT_TAG).wait()
    except BaseException as error:
        found = _transport_failure(error)
        if found is None:
            reason = f"{type(error).__name__}: {error}"
            group.board.post(reason)
            group.abort(reason)
            raise
        lost.append(found)
        raise _broken(group, version, found) from error
    finally:
        deadline.cancel()


class _Deadline(threading.Timer):
    """Ends an update that is still going on after the group's time-out, whatever it is that waits."""

    def __init__(self, group: SyncGroup, version: int) -> None:
        text = f"policy version {version} was not everywhere after {group.timeout_s:g} s (timeout.sync)"
        # Behind the time-outs of single operations, which know more.
        super().__init__(1.5 * group.timeout_s, group.abort, (text,))
        self.daemon = True
        self.start()


class _Watch:
    """One thread per member, waiting for its report all through the update.

    So one that dies is noticed at once and by name, whoever it was exchanging data with; the failure wakes the thread
    that sends.
    """

    def __init__(self, group: SyncGroup) -> None:
        self.left: set[int] = set()  # members whose connection closed
        self._group = group
        self._failure: TransportFailure | None = None
        self._dropping = threading.Lock()
        self._dropped = False
        self._threads = [
            threading.Thread(target=self._wait, args=(rank,), name=f"sync-report-{rank}", daemon=True)
            for rank in group.peers
        ]
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        """Wait for all reports. Raises TransportFailure."""
        for thread in self._threads:
            thread.join()
        if self._failure is not None:
            raise self._failure

    def drop(self) -> None:
        """Let go of all connections, so that every member notices; those that closed before are in `left`."""
        with self._dropping:
            if not self._dropped:
                time.sleep(_SETTLE_S)  # a death closes several connections, one after the other
                self._dropped = True
                self._group.drop()

    def _wait(self, rank: int) -> None:
        try:
            self._group.control.receive(torch.zeros(REPORT_BYTES, dtype=torch.uint8), rank, REPORT_TAG).wait()
        except TransportFailure as error:
            if self._dropped:
                return
            self._failure = error
            if error.peer_left:
                self.left.add(rank)
            self.drop()


def _judge(group: SyncGroup, left: set[int]) -> str:
    names = {member.rank: str(member) for member in group.members}
    return group.board.judge(group.peers, left, names, group.timeout_s)


def _give_up(group: SyncGroup, verdict: str) -> None:
    group.board.publish(verdict)
    group.abort(verdict)


def _broken(group: SyncGroup, version: int, lost: TransportFailure) -> SyncError:
    ended = group.ended
    group.board.post(ended)
    group.drop()
    verdict = ended or group.board.verdict()
    if verdict is None:
        verdict = f"{group.members[0]}, which leads the update, is gone or hangs: {lost}"
    group.abort(verdict)
    return SyncError(f"policy version {version} did not get through at {group.me}: {verdict}")


def _transport_failure(error: BaseException | None) -> TransportFailure | None:
    """It itself, or what it was raised from: an engine may wrap what its iterator of weights raises."""
    seen = 0
    while error is not None and seen < 10:
        if isinstance(error, TransportFailure):
            return error
        error, seen = error.__cause__ or error.__context__, seen + 1
    return None
