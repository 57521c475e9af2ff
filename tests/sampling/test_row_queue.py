"""Which engine gets which row: rows of slow, broken and dead engines go to others, and a bad row ends alone."""

from __future__ import annotations

import random
from collections import deque

from slurm_rlhf.sampling.row_queue import ENGINE_FAILURES, FAILURES, LEAST_SLOW_S, SLOW_FACTOR, RowQueue


def taken(queue: RowQueue, engine: int = 0) -> list[int]:
    return [*iter(lambda: queue.take(engine, 0.0), None)]


def test_rows_go_out_in_order_and_come_back_from_an_engine_that_is_gone() -> None:
    queue = RowQueue(deque(range(5)))
    assert [queue.take(0, 0.0), queue.take(1, 0.0), queue.take(0, 0.0)] == [0, 1, 2]
    assert queue.finish(0, 0, 1.0)
    assert queue.lose(0) == [2]
    assert not queue.finish(0, 2, 1.0)  # an answer that was on its way
    assert [queue.take(1, 1.0) for _ in range(4)] == [2, 3, 4, None]
    assert queue.unfinished == 4


def test_an_idle_engine_takes_the_row_that_another_has_had_for_long_and_the_first_answer_counts() -> None:
    queue = RowQueue(deque(range(4)))
    for row in range(3):
        queue.take(0, float(row))
    assert queue.take(1, 2.0) == 3
    assert queue.finish(1, 3, 4.0)
    limit = max(LEAST_SLOW_S, SLOW_FACTOR * 2.0)
    assert queue.take(1, limit) is None  # nobody is late yet
    assert queue.take(1, limit + 0.5) == 0
    assert queue.take(1, limit + 9.0) is None  # it has something to do now
    assert queue.fail(0, 0) == (False, False)  # the other one may answer it
    assert queue.fail(0, 0) == (False, False)  # and it has it no more
    assert queue.finish(1, 0, limit + 10.0)
    assert not queue.finish(0, 0, limit + 11.0)
    assert queue.unfinished == 2


def test_a_row_that_an_engine_refuses_costs_no_other_row() -> None:
    """An engine drops all that it has when a request fails; row 3 fails wherever it is."""
    queue = RowQueue(deque(range(8)))
    answered, errors, broken = set(), set(), False
    while queue.unfinished:
        held = taken(queue)
        assert held
        if 3 in held:
            for row in held:
                hopeless, broken = queue.fail(0, row)
                errors |= {row} if hopeless else set()
        else:
            answered |= {row for row in held if queue.finish(0, row, 1.0)}
        assert not broken
    assert answered == set(range(8)) - {3}
    assert errors == {3}


def test_an_engine_that_fails_everything_makes_no_row_an_error() -> None:
    queue = RowQueue(deque(range(6)))
    for count in range(1, ENGINE_FAILURES + 1):
        stated = [queue.fail(0, row) for row in taken(queue)]
        assert not any(hopeless for hopeless, _ in stated)
        assert stated[-1][1] == (count == ENGINE_FAILURES)
    queue.lose(0)
    rows = []
    while queue.unfinished:
        rows += taken(queue, 1)  # one at a time
        assert queue.finish(1, rows[-1], 2.0)
    assert sorted(rows) == [*range(6)]


def test_whatever_happens_every_row_is_answered_once() -> None:
    for seed in range(200):
        rng = random.Random(seed)
        queue, engines, now = RowQueue(deque(range(30))), {0, 1, 2, 3}, 0.0
        held: dict[int, list[int]] = {engine: [] for engine in engines}
        finished: list[int] = []
        while queue.unfinished:
            now += rng.random() * 4
            engine = rng.choice(sorted(engines))
            event = rng.random()
            if event < 0.55:
                row = queue.take(engine, now)
                held[engine] += [] if row is None else [row]
            elif event < 0.95 and held[engine]:
                row = held[engine].pop(rng.randrange(len(held[engine])))
                finished += [row] if queue.finish(engine, row, now) else []
            elif event > 0.98 and len(engines) > 1:
                engines.remove(engine)
                queue.lose(engine)
        assert sorted(finished) == list(range(30))


def test_a_row_is_no_error_where_its_engine_turns_out_to_be_broken() -> None:
    """The row fails alone as often as makes it an error, but the last time is what shows that the engine is broken."""
    queue = RowQueue(deque(range(1)))
    stated = []
    for _ in range(ENGINE_FAILURES):
        assert queue.take(0, 0.0) == 0
        queue._failures[0] = FAILURES - 1 if len(stated) == ENGINE_FAILURES - 1 else 0
        stated.append(queue.fail(0, 0))
    assert stated[-1] == (False, True)
    assert queue.unfinished
