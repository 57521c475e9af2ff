"""How responses are dealt to the actor's ranks: as many rounds for each, nothing twice, nothing lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_rlhf.sampling.scheduler import Wanted
from slurm_rlhf.sampling.scheduler import deal as deal_responses


def deal(lengths: list[int], samples: int, ranks: int, most: int) -> list[list[list[Wanted]]]:
    """To each of `samples` responses to a prompt, the same."""
    whole = {(position, k): length for position, length in enumerate(lengths) for k in range(samples)}
    return deal_responses(whole, ranks, most)


@given(st.lists(st.integers(1, 9), max_size=20), st.integers(1, 4), st.integers(1, 5), st.integers(1, 6))
def test_every_response_is_dealt_once_and_no_rank_gets_more_than_it_holds(
    lengths: list[int], samples: int, ranks: int, most: int
) -> None:
    rounds = deal(lengths, samples, ranks, most)
    assert all(len(parts) == ranks for parts in rounds)
    dealt = [one for parts in rounds for part in parts for one in part]
    assert sorted(dealt) == [(position, sample) for position in range(len(lengths)) for sample in range(samples)]
    sizes = [[len(part) for part in parts] for parts in rounds]
    assert all(max(of_ranks) <= most and max(of_ranks) - min(of_ranks) <= 1 for of_ranks in sizes)
    assert len(rounds) == -(-len(lengths) * samples // (ranks * most))


@pytest.mark.parametrize(("most", "rounds"), [(2, 2), (4, 1)])
def test_neighbours_in_length_are_sampled_together(most: int, rounds: int) -> None:
    found = deal([9, 1, 8, 2, 7, 3, 6, 4], 1, 2, most)
    assert len(found) == rounds
    assert sorted(position for part in found[0] for position, _ in part)[: 2 * most] == (
        [1, 3, 5, 7] if rounds == 2 else list(range(8))
    )


@given(st.integers(1, 20), st.integers(1, 9), st.integers(1, 4))
def test_all_samples_of_a_prompt_are_with_one_rank_where_shares_are_even(
    prompts: int, samples: int, ranks: int
) -> None:
    (parts,) = deal([5] * prompts, samples, ranks, most=200)
    of_ranks = [{position for position, _ in part} for part in parts]
    twice = sum(map(len, of_ranks)) - prompts
    assert twice <= (ranks - 1 if prompts % ranks else 0)


def test_ranks_have_prompts_of_like_length() -> None:
    lengths = [9, 1, 8, 2, 7, 3, 6, 4]
    (parts,) = deal(lengths, 2, 2, 8)
    assert [[lengths[position] for position, _ in part[::2]] for part in parts] == [[1, 3, 6, 8], [2, 4, 7, 9]]
