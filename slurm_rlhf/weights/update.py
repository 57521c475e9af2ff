"""The frame of an update: members tell why they failed, and learn why others did.

Rank 0 leads: it waits for the reports of all others, judges a failure and publishes the verdict.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from slurm_rlhf.errors import SyncBroken, SyncError
from slurm_rlhf.weights.backends import TransportFailure
from slurm_rlhf.weights.diagnosis import Diagnosis, cut
from slurm_rlhf.weights.group import SyncGroup
from slurm_rlhf.wire import timeouts

REPORT_TAG = (1 << 30) + 1
"""Tag of a member's report that it has done its part of an update; chunks have lower tags."""
DONE_TAG = (1 << 30) + 2
"""Tag of rank 0's message that all members have done their part."""

log = logging.getLogger(__name__)


@contextmanager
def leading(group: SyncGroup, version: int) -> Iterator[None]:
    """Lead an update, as rank 0: leave the block when every member has reported.

    Raises SyncError within the group's time-out, naming the member that died, hangs or refused; the group is spent.
    """
    group.check()
    deadline = _Deadline(group, version)
    # A death closes several connections, one after the other.
    reports = _Messages(group, group.peers, REPORT_TAG, None, timeouts.CLOSING_S)
    try:
        with group.heartbeat.watched(reports.miss):
            yield
            reports.join()
        for rank in group.peers:
            group.control.send(_word(), rank, DONE_TAG).wait()
        if group.heartbeat.unheard:
            log.warning(
                "%s hears no heartbeats from members %s: their datagrams do not come through, so that a cut link "
                "would be found after %g s",
                group.me,
                list(group.heartbeat.unheard),
                group.timeout_s,
            )
    except TransportFailure as error:
        reports.drop()
        found = _ended(group) or group.board.judge(group.members, reports.left, group.quiet, _words(error))
        verdict = Diagnosis(
            f"weight update to policy version {version} failed: {found.text}", found.refused, found.silent
        )
        _give_up(group, verdict)
        raise _error(verdict) from error
    except BaseException as error:
        _give_up(group, Diagnosis(f"{group.me} gave up the update to policy version {version}: {error}", refused=True))
        raise
    finally:
        deadline.cancel()


@contextmanager
def following(group: SyncGroup, version: int) -> Iterator[None]:
    """Take part in an update, as any other rank: report its end to rank 0, and what the block raises.

    Raises SyncError with rank 0's verdict where the connections broke; the group is spent.
    """
    group.check()
    deadline = _Deadline(group, version)
    # Rank 0's last message is waited for longer than rank 0 waits itself, because it knows who was late.
    lead = _Messages(group, (0,), DONE_TAG, 2 * group.timeout_s, 0.0)
    try:
        with group.heartbeat.watched(lead.miss):
            yield
            group.control.send(_word(), 0, REPORT_TAG).wait()
            lead.join()
    except BaseException as error:
        found = _transport_failure(error)
        if found is None:
            group.abort(f"{type(error).__name__}: {error}")
            raise
        raise _broken(group, version, found) from error
    finally:
        deadline.cancel()


class _Deadline(threading.Timer):
    """End an update that still runs when its time is over, whatever it waits for."""

    def __init__(self, group: SyncGroup, version: int) -> None:
        # Later than the time-outs of single operations, whose errors say more.
        super().__init__(1.5 * group.timeout_s, self._over, (group, version))
        self.daemon = True
        self.start()

    def _over(self, group: SyncGroup, version: int) -> None:
        group.late = True
        group.abort(f"policy version {version} did not reach all members in {1.5 * group.timeout_s:g} s (timeout.sync)")


class _Messages:
    """Waits for a message of each of some members, each in a thread of its own, all through the update.

    So a member that dies is noticed at once and by name, whoever it was exchanging data with; the failure wakes the
    threads that send and receive.
    """

    def __init__(self, group: SyncGroup, peers: Iterable[int], tag: int, limit_s: float | None, pause_s: float) -> None:
        """`limit_s`: None for the group's time-out. `pause_s`: from a failure to the end of all connections."""
        self.left: set[int] = set()  # members whose connection closed before the others'
        self._group = group
        self._tag = tag
        self._limit_s = limit_s
        self._pause_s = pause_s
        self._failure: TransportFailure | None = None
        self._dropping = threading.Lock()
        self._dropped = False
        self._threads = [
            threading.Thread(target=self._wait, args=(rank,), name=f"sync-report-{rank}", daemon=True) for rank in peers
        ]
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        """Wait for all messages. Raises TransportFailure."""
        for thread in self._threads:
            # A drop need not wake a thread that receives.
            while thread.is_alive() and not self._group.dropped.is_set():
                thread.join(timeouts.POLL_S)
        if self._failure is not None or self._group.dropped.is_set():
            raise self._failure or TransportFailure("the connections were given up", peer_left=False)

    def miss(self, quiet: tuple[int, ...]) -> None:
        """Say that members are not heard any more, and let go of all connections."""
        self._group.report_silence(quiet)
        self.drop()

    def drop(self) -> None:
        """Let go of all connections, so that every member notices."""
        with self._dropping:
            if not self._dropped:
                time.sleep(self._pause_s)
                self._dropped = True
                self._group.drop()

    def _wait(self, rank: int) -> None:
        try:
            self._group.control.receive(_word(), rank, self._tag).wait(self._limit_s)
        except Exception as error:  # whatever it is, the update must not wait for this thread
            if self._dropped:
                return
            self._failure = _as_failure(error)
            if self._failure.peer_left:
                self.left.add(rank)
            self.drop()


def _as_failure(error: Exception) -> TransportFailure:
    if isinstance(error, TransportFailure):
        return error
    log.error("the thread that waits for a report of the update failed", exc_info=error)
    return TransportFailure(f"{type(error).__name__}: {error}", peer_left=False)


def _word() -> torch.Tensor:
    """Make a message that says nothing but that it came."""
    return torch.zeros(1, dtype=torch.uint8)


def _words(lost: TransportFailure) -> str:
    """Return what the backend said, where that was the cause and not a consequence."""
    return str(lost) if lost.peer_left else ""


def _ended(group: SyncGroup) -> Diagnosis | None:
    """Return why this rank has aborted the group; None: it has not."""
    return Diagnosis(group.ended, refused=not group.late, silent=group.late) if group.ended else None


def _give_up(group: SyncGroup, verdict: Diagnosis) -> None:
    group.board.publish(verdict)
    group.abort(verdict.text)


def _broken(group: SyncGroup, version: int, lost: TransportFailure) -> SyncError:
    ended = _ended(group)
    group.board.post(ended.text if ended and ended.refused else "", lost=_words(lost))
    group.drop()
    # A member that does not hear rank 0 does not wait for its verdict.
    verdict = ended or (None if 0 in group.quiet else group.board.verdict())
    if verdict is None and group.quiet:
        verdict = Diagnosis(cut({group.rank: group.quiet}, {group.rank}, group.members, group.silence_s), silent=True)
    if verdict is None:
        verdict = Diagnosis(f"{group.members[0]}, which leads the update, is gone or hangs: {lost}", silent=True)
    # Not posted: a leader that hung reads posts later, and would take the verdict for a refusal, which ends the run.
    group.abort(verdict.text, known=True)
    text = f"policy version {version} did not get through at {group.me}: {verdict.text}"
    return _error(Diagnosis(text, verdict.refused, verdict.silent))


def _error(verdict: Diagnosis) -> SyncError:
    return (SyncError if verdict.refused else SyncBroken)(verdict.text, hang=verdict.silent)


def _transport_failure(error: BaseException | None) -> TransportFailure | None:
    """Return the failure itself, or what it was raised from: an engine may wrap what its iterator of weights raises."""
    seen = 0
    while error is not None and seen < 10:
        if isinstance(error, TransportFailure):
            return error
        error, seen = error.__cause__ or error.__context__, seen + 1
    return None
