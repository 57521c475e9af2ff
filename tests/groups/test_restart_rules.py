"""Where an engine that died starts again."""

from __future__ import annotations

import pytest

from slurm_rlhf.errors import PlacementError
from slurm_rlhf.groups.restarts import Loss, incidents, next_place


def losses(*found: tuple[int, str, float]) -> list[Loss]:
    return [Loss(*each) for each in found]


def test_an_engine_starts_again_where_it_was_and_is_left_out_after_so_many_deaths() -> None:
    once = losses((1, "n1", 0.0))
    assert next_place(1, "n1", once, [], False, 3) == "n1"
    assert next_place(1, "n1", once, ["n3"], False, 3) == "n1"  # its node is well
    often = losses(*((1, "n1", 100.0 * at) for at in range(4)))
    with pytest.raises(PlacementError, match=r"^it died 4 times \(train.max_engine_restarts = 3\)$"):
        next_place(1, "n1", often, ["n3"], False, 3)
    with pytest.raises(PlacementError, match="it died 1 times"):
        next_place(1, "n1", once, [], False, 0)


def test_a_node_that_is_gone_gives_its_engines_to_a_spare_one_if_there_is_one() -> None:
    gone = losses((1, "n1", 0.0), (2, "n1", 0.1))
    assert next_place(1, "n1", gone, ["n3", "n4"], True, 3) == "n3"
    assert next_place(1, "n1", gone, [], True, 3) == "n1"  # it may come back


def test_a_node_that_loses_engines_again_and_again_gets_no_further_one() -> None:
    often = losses(*((engine, "n1", 100.0 * engine) for engine in range(3)))
    assert incidents(often, "n1") == 3
    assert next_place(2, "n1", often, ["n3"], False, 2) == "n3"
    with pytest.raises(PlacementError, match="n1 lost engines 3 times"):
        next_place(2, "n1", often, [], False, 2)
    spare_too = [*often, *losses(*((engine, "n3", 100.0 * engine) for engine in range(3, 6)))]
    with pytest.raises(PlacementError, match="n3 lost engines 3 times"):
        next_place(5, "n3", spare_too, ["n3"], True, 2)


def test_a_spare_that_preflight_found_bad_gets_no_engine() -> None:
    gone, bad = losses((1, "n1", 0.0)), {"n3": "another version of vLLM"}
    assert next_place(1, "n1", gone, ["n3", "n4"], True, 3, bad) == "n4"
    assert next_place(1, "n1", gone, ["n3"], True, 3, bad) == "n1"  # it may come back
    often = losses(*((engine, "n1", 100.0 * engine) for engine in range(3)))
    stated = r"\(train.max_engine_restarts = 2\); n3 is free and not taken: another version of vLLM$"
    with pytest.raises(PlacementError, match=stated):
        next_place(2, "n1", often, ["n3"], False, 2, {**bad, "n9": "has ranks"})


def test_engines_that_a_node_loses_together_are_one_loss() -> None:
    together = losses(*((engine, "n1", 5000 + 0.1 * engine) for engine in range(8)))
    assert incidents(together, "n1") == 1
    assert incidents(together, "n2") == 0
    assert next_place(7, "n1", together, [], False, 1) == "n1"
