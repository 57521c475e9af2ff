"""Which rank the others wait for, by the phases that heartbeats bring."""

from __future__ import annotations

import pytest

from slurm_rlhf.engine.engine import GATHERING, SAMPLING, WAITING, behind, phase_of


def test_phases_are_written_in_words() -> None:
    assert phase_of(2, 17, 3) == "generate: batch 2, token 17, layer 3"
    assert phase_of(1, 0, GATHERING) == "generate: batch 1, token 0, gathering parameters"


@pytest.mark.parametrize(
    ("phases", "late"),
    [
        ([(1, 5, SAMPLING), (1, 5, WAITING), (1, 5, WAITING)], [0]),
        ([(1, 6, 3), (1, 6, 2), (1, 6, 3)], [1]),
        ([(1, 6, 0), (1, 5, SAMPLING), (1, 6, 12)], [1]),
        ([(2, 0, GATHERING), (1, 64, WAITING), (2, 0, GATHERING)], [1]),
        ([(10, 1, 2), (9, 70, 2)], [1]),
        ([(1, 6, 0), (1, 6, SAMPLING), (1, 6, 0)], [0, 2]),
        ([(1, 6, 2), (1, 6, 2)], []),
        ([], []),
    ],
)
def test_who_has_come_less_far_is_behind(phases: list[tuple[int, int, int | str]], late: list[int]) -> None:
    assert behind({rank: phase_of(*phase) for rank, phase in enumerate(phases)}) == late


def test_who_has_not_begun_is_behind() -> None:
    assert behind({0: phase_of(1, 3, WAITING), 1: "idle after train_step"}) == [1]
    assert behind({0: "idle after train_step", 1: "idle after train_step"}) == []
