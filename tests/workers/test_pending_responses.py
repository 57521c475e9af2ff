"""Which call a finished response goes back with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_rlhf.control.codec import decode
from slurm_rlhf.control.request import Request
from slurm_rlhf.errors import RunError
from slurm_rlhf.workers.pending_responses import Tickets


class Calls:
    """Requests as the control plane makes them, and what was answered to each."""

    def __init__(self) -> None:
        self.answers: dict[int, tuple[str, Any]] = {}
        self._ids: Iterator[int] = iter(range(1, 1000))

    def make(self) -> Request:
        return Request("generate", {}, next(self._ids), self._send)

    def _send(self, kind: str, frames: Any, call: int) -> None:
        self.answers[call] = (kind, decode([memoryview(frame) for frame in frames]))


@given(st.lists(st.integers(1, 6), min_size=1, max_size=8), st.randoms(use_true_random=False))
def test_every_response_goes_back_once_and_calls_in_their_order(counts: list[int], dice: Any) -> None:
    calls, tickets = Calls(), Tickets()
    requests = [calls.make() for _ in counts]
    for request, count in zip(requests, counts, strict=True):
        tickets.open(7, request, count)
    responses = list(range(sum(counts)))
    dice.shuffle(responses)
    order = []
    for done, response in enumerate(responses, start=1):
        if completed := tickets.finish(7, response):
            request, found = completed
            request.reply(found)
            order.append(request.id)
            # Answered as soon as there is enough, whichever call they belong to.
            assert done == sum(counts[: len(order)])
    assert order == [request.id for request in requests]
    assert [len(calls.answers[i][1]) for i in order] == counts
    assert sorted(x for i in order for x in calls.answers[i][1]) == sorted(responses)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=8), st.randoms(use_true_random=False))
def test_one_call_may_ask_for_what_others_come_for_whenever_they_come(counts: list[int], dice: Any) -> None:
    tickets = Tickets()
    requests = [Calls().make() for _ in counts]
    assert tickets.open(7, requests[0], counts[0], sum(counts)) is None
    events = ["finish"] * sum(counts) + ["come"] * (len(counts) - 1)
    dice.shuffle(events)
    answered: list[list[int]] = []
    responses, coming = iter(range(sum(counts))), iter(range(1, len(counts)))
    for event in events:
        if event == "come":
            call = next(coming)
            found = tickets.open(7, requests[call], counts[call], 0)
        else:
            completed = tickets.finish(7, next(responses))
            found = completed[1] if completed else None
            assert completed is None or completed[0] is requests[len(answered)]
        if found is not None:
            answered.append(found)
    assert [len(found) for found in answered] == counts
    assert [response for found in answered for response in found] == list(range(sum(counts)))
    with pytest.raises(RunError, match="a call came for 1 responses of stream 7, and 0 are left"):
        tickets.open(7, requests[0], 1, 0)
    with pytest.raises(KeyError):
        tickets.finish(7, "one too many")


def test_streams_do_not_mix() -> None:
    calls, tickets = Calls(), Tickets()
    training, evaluation = calls.make(), calls.make()
    tickets.open(1, training, 1)
    tickets.open(2, evaluation, 1)
    assert tickets.finish(2, "evaluated") == (evaluation, ["evaluated"])
    assert tickets.finish(1, "trained") == (training, ["trained"])
    with pytest.raises(KeyError):
        tickets.finish(1, "one too many")


def test_a_failed_engine_fails_every_open_call() -> None:
    calls, tickets = Calls(), Tickets()
    for stream in (1, 1, 2):
        tickets.open(stream, calls.make(), 2)
    tickets.finish(1, "lost")
    tickets.fail(RunError("the engine broke"))
    assert [kind for kind, _ in calls.answers.values()] == ["error"] * 3
    assert all("the engine broke" in str(body) for _, body in calls.answers.values())
    with pytest.raises(KeyError):
        tickets.finish(2, "late")
