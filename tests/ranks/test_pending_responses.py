"""Which call a finished response goes back with."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_rlhf.errors import RunError
from slurm_rlhf.ranks.engine_leader import PendingResponses


@given(st.lists(st.integers(1, 6), min_size=1, max_size=8), st.randoms(use_true_random=False))
def test_every_response_goes_back_once_and_calls_in_their_order(counts: list[int], dice: Any) -> None:
    pending = PendingResponses()
    requests: list[Any] = [Future() for _ in counts]
    for request, count in zip(requests, counts, strict=True):
        pending.open(7, request, count)
    responses = list(range(sum(counts)))
    dice.shuffle(responses)
    order: list[Any] = []
    for done, response in enumerate(responses, start=1):
        if completed := pending.finish(7, response):
            request, found = completed
            request.set_result(found)
            order.append(request)
            # Answered as soon as there is enough, whichever call they belong to.
            assert done == sum(counts[: len(order)])
    assert order == requests
    assert [len(request.result(0)) for request in order] == counts
    assert sorted(x for request in order for x in request.result(0)) == sorted(responses)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=8), st.randoms(use_true_random=False))
def test_one_call_may_ask_for_what_others_come_for_whenever_they_come(counts: list[int], dice: Any) -> None:
    pending = PendingResponses()
    requests: list[Any] = [Future() for _ in counts]
    assert pending.open(7, requests[0], counts[0], sum(counts)) is None
    events = ["finish"] * sum(counts) + ["come"] * (len(counts) - 1)
    dice.shuffle(events)
    answered: list[list[int]] = []
    responses, coming = iter(range(sum(counts))), iter(range(1, len(counts)))
    for event in events:
        if event == "come":
            call = next(coming)
            found = pending.open(7, requests[call], counts[call], 0)
        else:
            completed = pending.finish(7, next(responses))
            found = completed[1] if completed else None
            assert completed is None or completed[0] is requests[len(answered)]
        if found is not None:
            answered.append(found)
    assert [len(found) for found in answered] == counts
    assert [response for found in answered for response in found] == list(range(sum(counts)))
    with pytest.raises(RunError, match="a call came for 1 responses of stream 7, and 0 are left"):
        pending.open(7, requests[0], 1, 0)
    with pytest.raises(KeyError):
        pending.finish(7, "one too many")


def test_streams_do_not_mix() -> None:
    pending = PendingResponses()
    training, evaluation = Future[Any](), Future[Any]()
    pending.open(1, training, 1)
    pending.open(2, evaluation, 1)
    assert pending.finish(2, "evaluated") == (evaluation, ["evaluated"])
    assert pending.finish(1, "trained") == (training, ["trained"])
    with pytest.raises(KeyError):
        pending.finish(1, "one too many")


def test_a_failed_engine_fails_every_open_call() -> None:
    pending = PendingResponses()
    answers = [Future[Any]() for _ in range(3)]
    for stream, answer in zip((1, 1, 2), answers, strict=True):
        pending.open(stream, answer, 2)
    pending.finish(1, "lost")
    pending.fail(RunError("the engine broke"))
    assert all("the engine broke" in str(answer.exception(0)) for answer in answers)
    with pytest.raises(KeyError):
        pending.finish(2, "late")
