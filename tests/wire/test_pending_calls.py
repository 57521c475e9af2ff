"""The deadlines of calls in flight."""

from __future__ import annotations

from slurm_rlhf.wire.messages import Flight, Peer, PendingCalls

HOUR = 3600.0


def test_deadlines_of_answered_calls_are_forgotten_and_those_of_others_kept() -> None:
    """A run makes a million calls before the deadline of its first has passed."""
    calls, peer = PendingCalls(), Peer("actor", 0, 1, "node", 1)
    slow = calls.add(peer, "save", 2.0, dict, 0.0)
    for number in range(20_000):
        call = calls.add(peer, "train_step", HOUR, dict, number * 1e-5)
        assert calls.answered(call.id, peer, number * 1e-5) is call
    assert calls.flights(1.0) == [Flight(peer, "save", 1.0, 2.0)]
    busy = calls.add(peer, "train_step", 2.0, dict, 0.0)  # its rank answers: the last time at 0.2
    waiting = [calls.add(peer, "generate", HOUR, dict, 1.0) for _ in range(1000)]
    assert calls.expired(2.1) == [slow]
    assert calls.expired(2 * HOUR) == [busy, *waiting]
