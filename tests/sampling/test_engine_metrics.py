"""Which engines are named as slow, and how prompts are dealt out: pure functions."""

from __future__ import annotations

import statistics
from fractions import Fraction
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_rlhf.records import EngineLoad, Sampling
from slurm_rlhf.run.step_metrics import EngineMetrics, far_below
from slurm_rlhf.sampling.batches import allowance
from slurm_rlhf.sampling.scheduler import Scheduler


@pytest.mark.parametrize("rates", [[6000.0, 0.0], [6000.0], []])
def test_an_engine_without_prompts_or_without_peers_is_not_slow(rates: list[float]) -> None:
    assert far_below(dict(enumerate(rates))) == {}


@settings(deadline=None)
@given(st.lists(st.integers(1, 1000), min_size=2, max_size=9))
def test_the_peers_median_leaves_the_engine_out(rates: list[int]) -> None:
    found = far_below({engine: float(rate) for engine, rate in enumerate(rates)})
    for engine, rate in enumerate(rates):
        peers = statistics.median(Fraction(other) for place, other in enumerate(rates) if place != engine)
        assert (engine in found) == (rate < peers / 2)
        assert found.get(engine, peers) == peers


@pytest.mark.parametrize(("width", "urgent", "least"), [(64, False, 8), (8, False, 1), (64, True, 1)])
def test_an_engine_answers_with_an_eighth_of_its_width(width: int, urgent: bool, least: int) -> None:
    scheduler = Scheduler(cast(Any, None), 1, width, urgent=urgent)
    assert scheduler._batch([], Sampling()).least == least


def load(tokens_per_s: float) -> EngineLoad:
    return EngineLoad(tokens=int(tokens_per_s), responses=4, steps=100, busy_s=1.0, queued_s=2.0, kv_usage=0.25)


def test_a_slow_engine_is_named_once_with_node_and_figures() -> None:
    stated, kinds = [], []

    def note(text: str, kind: str, engine: int) -> None:
        stated.append(text)
        kinds.append((kind, engine))

    nodes = {0: "gpu01", 1: "gpu02"}
    metrics = EngineMetrics(nodes.__getitem__, note)
    for step, rate in enumerate([1500, 6000, 1500, 1400, 1300, 5900, 1500], start=1):
        measured = metrics.step(step, {0: load(6000), 1: load(rate)})
        assert measured["perf/engine/1/tokens_per_s"] == rate
    assert kinds == [("warning", 1)]
    assert stated[0].startswith("step 4: engine 1 on gpu02 is far below its peers for 2 steps: 1400 tokens/s")
    assert "the others' median is 6000" in stated[0]


def test_an_engine_without_prompts_ends_the_streak_and_is_not_back() -> None:
    stated: list[str] = []
    metrics = EngineMetrics(str, lambda text, kind, engine: stated.append(text))
    heard = []
    for step, rate in enumerate([1.0, 0.0, 1.0, 1.0, 0.0], start=1):
        metrics.step(step, {0: load(9.0), 1: load(rate)})
        heard.append(len(stated))
    assert heard == [0, 0, 0, 1, 1]


def test_the_load_of_an_engine_as_metrics() -> None:
    whole = EngineLoad()
    whole.add(EngineLoad(tokens=300, responses=2, steps=100, busy_s=2.0, queued_s=1.0, kv_usage=0.5))
    whole.add(EngineLoad(tokens=100, steps=100, busy_s=2.0, kv_usage=0.25))
    assert whole.metrics() == {
        "tokens_per_s": 100.0,
        "busy_s": 4.0,
        "responses": 2.0,
        "running": 2.0,
        "waiting": 0.25,
        "kv_usage": 0.5,
    }
    assert set(EngineLoad().metrics().values()) == {0.0}


@settings(deadline=None)
@given(st.integers(1, 2000), st.integers(1, 16), st.integers(1, 300), st.sampled_from([1.0, 2.0, 5.0]))
def test_a_slow_engine_has_nothing_in_reserve_when_the_last_prompt_is_handed_out(
    prompts: int, engines: int, width: int, slowness: float
) -> None:
    """Engine 0 is slower than the others; every prompt takes as long as every other on one engine."""
    left, held, clock = prompts, [0] * engines, [0.0] * engines
    speed = [1.0 / slowness, *[1.0] * (engines - 1)]

    def feed(engine: int) -> bool:
        nonlocal left
        if not left or held[engine] >= allowance(left, engines, width):
            return False
        left -= 1
        held[engine] += 1
        return True

    while sum(feed(engine) for engine in range(engines)):
        pass
    if prompts >= engines:
        assert max(held) - min(held) <= 1
    while left:
        engine = min(range(engines), key=lambda e: clock[e] + 1 / (speed[e] * min(held[e], width)))
        clock[engine] += 1 / (speed[engine] * min(held[engine], width))
        held[engine] -= 1
        while feed(engine):
            pass
    if engines > 1:
        assert held[0] <= width + 1
