"""Curves and bars of characters: worked cases, and what holds for any numbers."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from slurm_rlhf.observe.sparkline import bar, sparkline


def test_worked_cases() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([0, 0, 1, 1], 2) == "▁█"
    assert sparkline([3, 3, 3], 10) == "▅▅▅"
    assert sparkline([1, None, math.nan, 2], 9) == "▁  █"
    assert sparkline([], 5) == sparkline([None, math.inf], 5) == ""
    assert bar({"rollout": 2.0, "update": 1.0, "sync": 1.0}, 8) == "rrrruuss"
    assert bar({"rollout": 0.0}, 8) == bar({}, 8) == ""


@given(st.lists(st.none() | st.floats(-1e6, 1e6)), st.integers(1, 50))
def test_a_curve_has_its_width(values: list[float | None], width: int) -> None:
    assert len(sparkline(values, width)) <= min(width, len(values))


@given(st.dictionaries(st.sampled_from("abcdef"), st.floats(0, 1e6), min_size=1), st.integers(1, 80))
def test_a_bar_is_full_and_fair(parts: dict[str, float], width: int) -> None:
    drawn = bar(parts, width)
    total = sum(parts.values())
    assert len(drawn) == (width if total > 0 else 0)
    for name, value in parts.items():
        if total > 0:
            assert abs(drawn.count(name) - value / total * width) < 2
