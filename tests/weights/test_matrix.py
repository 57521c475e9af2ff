"""Engines have the actor's weights after every update, whatever the model, the ranks, the ZeRO stage, the precision."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, product

import pytest
from sync_cells import Bench, Cell

pytestmark = [pytest.mark.slow]

AXES = (("qwen2", "qwen3", "llama"), (True, False), (1, 2), (2, 3), ("fp32", "bf16"))
PAIRWISE = (
    Cell("qwen2", True, 2, 3, "fp32"),
    Cell("qwen2", False, 1, 2, "bf16"),
    Cell("qwen3", True, 1, 2, "fp32"),
    Cell("qwen3", False, 2, 3, "bf16"),
    Cell("llama", True, 2, 2, "bf16"),
    Cell("llama", False, 1, 3, "fp32"),
)
BOUNDS = {"fp32": 1e-5, "bf16": 0.15}
"""Of a log-prob; bf16 has 8 bits of mantissa, in every layer."""


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    made = Bench(tmp_path_factory.mktemp("cells"))
    yield made
    made.end()


def check(bench: Bench, cell: Cell) -> None:
    updates = bench.run(cell)
    print(cell, " ".join(f"{current:.2g}/{stale:.2g}" for current, stale in updates))
    assert len(updates) == 2
    for current, stale in updates:
        assert current < BOUNDS[cell.dtype]
        assert stale > 5 * BOUNDS[cell.dtype]


def test_every_pair_of_values_is_covered() -> None:
    cells = [(c.arch, c.tied, c.tp, c.zero, c.dtype) for c in PAIRWISE]
    for (i, first), (j, second) in combinations(enumerate(AXES), 2):
        for pair in product(first, second):
            assert any((cell[i], cell[j]) == pair for cell in cells), pair


@pytest.mark.parametrize("cell", PAIRWISE, ids=str)
def test_the_engine_has_the_actors_weights(bench: Bench, cell: Cell) -> None:
    check(bench, cell)


@pytest.mark.full
@pytest.mark.parametrize("cell", [Cell(*values) for values in product(*AXES)], ids=str)
def test_the_engine_has_the_actors_weights_in_every_case(bench: Bench, cell: Cell) -> None:
    check(bench, cell)
