"""Mini-batches, ranks and micro-batches."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_rlhf.algorithms.batching import micro_batches, mini_batches, split_ranks
from slurm_rlhf.algorithms.layout import Layout
from slurm_rlhf.config.load import load_config
from slurm_rlhf.config.roles import of_command, running_roles

lengths_and_ranks = st.integers(1, 4).flatmap(
    lambda dp: st.integers(0, 5).flatmap(
        lambda each: st.tuples(st.lists(st.integers(1, 100), min_size=dp * each, max_size=dp * each), st.just(dp))
    )
)


def padded(micro: list[int], lengths: list[int]) -> int:
    return max(lengths[i] for i in micro) * len(micro)


def fewest_groups(items: list[int], lengths: list[int], max_tokens: int) -> int:
    """Over every partition of the items."""

    def search(rest: list[int], groups: list[list[int]]) -> int:
        if not rest:
            fits = all(len(g) == 1 or padded(g, lengths) <= max_tokens for g in groups)
            return len(groups) if fits else len(items) + 1
        head, tail = rest[0], rest[1:]
        options = [search(tail, [*groups[:k], [*groups[k], head], *groups[k + 1 :]]) for k in range(len(groups))]
        return min([*options, search(tail, [*groups, [head]])])

    return search(items, [])


def test_mini_batches_cover_everything_once_and_depend_on_seed_and_epoch() -> None:
    first = mini_batches(12, 4, seed=1, epoch=0)
    assert [len(batch) for batch in first] == [4, 4, 4]
    assert sorted(i for batch in first for i in batch) == list(range(12))
    assert first == mini_batches(12, 4, seed=1, epoch=0)
    assert first != mini_batches(12, 4, seed=1, epoch=1)
    assert first != mini_batches(12, 4, seed=2, epoch=0)
    assert mini_batches(0, 4, seed=1, epoch=0) == []
    for size in (5, 0):
        with pytest.raises(ValueError, match="12 sequences do not divide"):
            mini_batches(12, size, seed=1, epoch=0)


def test_split_ranks_by_hand() -> None:
    # 9 -> rank 0, 7 -> rank 1, 3 -> rank 1, 2 -> rank 0
    assert split_ranks([2, 9, 3, 7], 2) == [[0, 1], [2, 3]]
    with pytest.raises(ValueError, match="3 sequences do not divide over 2 ranks"):
        split_ranks([1, 2, 3], 2)


@settings(max_examples=100, deadline=None)
@given(lengths_and_ranks)
def test_split_ranks_is_even_complete_and_balanced(case: tuple[list[int], int]) -> None:
    lengths, dp = case
    ranks = split_ranks(lengths, dp)
    assert [len(rank) for rank in ranks] == [len(lengths) // dp] * dp
    assert sorted(i for rank in ranks for i in rank) == list(range(len(lengths)))
    assert ranks == split_ranks(lengths, dp)
    if lengths:
        # While no rank is full, the fewest tokens are served first; a full one leaves at most the shorter rest over.
        tokens = [sum(lengths[i] for i in rank) for rank in ranks]
        assert max(tokens) - min(tokens) <= max(lengths) * max(1, len(lengths) // dp - 1)


def test_split_ranks_balances_a_skewed_batch() -> None:
    lengths = [1000 // (i + 1) for i in range(64)]
    tokens = [sum(lengths[i] for i in rank) for rank in split_ranks(lengths, 4)]
    assert max(tokens) / min(tokens) < 1.25


def test_micro_batches_by_hand() -> None:
    lengths = [10, 4, 4, 2, 30, 1, 1, 1]
    # Rank 0 packs {10}, {4, 4}, {2}?  longest first with 12 padded tokens: [10], [4, 4, 2]. Rank 1: [30], [1, 1, 1].
    assert micro_batches([[0, 1, 2, 3], [4, 5, 6, 7]], lengths, 12) == [[[1, 2, 3], [0]], [[4], [5, 6, 7]]]
    # Rank 1 alone needs four; rank 0 follows.
    assert micro_batches([[5, 6, 7], [0, 1, 4]], lengths, 3) == [[[5], [6], [7]], [[4], [0], [1]]]
    assert micro_batches([[], []], lengths, 3) == [[], []]


@settings(max_examples=100, deadline=None)
@given(lengths_and_ranks, st.integers(1, 300))
def test_micro_batches_fit_and_are_the_fewest(case: tuple[list[int], int], max_tokens: int) -> None:
    lengths, dp = case
    ranks = split_ranks(lengths, dp)
    result = micro_batches(ranks, lengths, max_tokens)
    assert result == micro_batches(ranks, lengths, max_tokens)
    wanted = max(fewest_groups(rank, lengths, max_tokens) for rank in ranks)
    for rank, micros in zip(ranks, result, strict=True):
        assert sorted(i for micro in micros for i in micro) == rank
        assert len(micros) == wanted
        assert all(micro and micro == sorted(micro) for micro in micros)
        assert all(len(micro) == 1 or padded(micro, lengths) <= max_tokens for micro in micros)
        assert all(padded(a, lengths) >= padded(b, lengths) for a, b in pairwise(micros))


PACKED = Layout(packed=True, attention=1 / 48)


@settings(max_examples=100, deadline=None)
@given(lengths_and_ranks, st.integers(1, 300))
def test_packed_micro_batches_fit_and_are_few(case: tuple[list[int], int], max_tokens: int) -> None:
    lengths, dp = case
    ranks = split_ranks([PACKED.cost(length) for length in lengths], dp)
    result = micro_batches(ranks, lengths, max_tokens, PACKED)
    assert result == micro_batches(ranks, lengths, max_tokens, PACKED)
    assert len({len(micros) for micros in result}) <= 1
    for rank, micros in zip(ranks, result, strict=True):
        assert sorted(i for micro in micros for i in micro) == rank
        assert all(micro and micro == sorted(micro) for micro in micros)
        assert all(len(micro) == 1 or PACKED.size([lengths[i] for i in micro]) <= max_tokens for micro in micros)
    if lengths:
        needed = max(sum(lengths[i] for i in rank) / max_tokens for rank in ranks)
        long = max(sum(2 * lengths[i] > max_tokens for i in rank) for rank in ranks)
        assert len(result[0]) <= 2 * needed + long + 1


HIDDEN = {"7B": 3584, "32B": 5120}
"""Size in the name of a Qwen 2.5 -> width of its hidden states."""
SBATCH = Path(__file__).resolve().parents[2] / "sbatch"


def shipped() -> dict[str, tuple[int, int, int, int]]:
    """File and role -> (sequences of an optimizer step, ranks, train.max_tokens_per_gpu, hidden size)."""
    found = {}
    for file in sorted(SBATCH.rglob("*.toml")):
        config = of_command(load_config(file, []), file.stem)
        batch = config.sft.batch_size if file.stem == "sft" else config.train.batch_size
        size = next((size for size in HIDDEN if f"-{size}-" in f"{config.actor.model_name_or_path}-"), "")
        for role in running_roles(config) if size else ():
            if role.kind == "trained":
                rest = config.train.max_tokens_per_gpu, HIDDEN[size]
                found[f"{file.stem} {role.name}"] = (batch, role.ranks(config), *rest)
    return found


SHIPPED = shipped()


def test_all_that_is_shipped_is_read() -> None:
    assert SHIPPED["ppo_7b critic"] == (96, 6, 32768, 3584)
    assert SHIPPED["grpo_32b actor"] == (1024, 32, 32768, 5120)
    assert (SHIPPED["sft actor"], len(SHIPPED)) == ((128, 16, 8192, 3584), 24)


@pytest.mark.parametrize("name", SHIPPED)
def test_no_rank_of_a_shipped_run_waits_long(name: str) -> None:
    """Tokens on all ranks against those of the critical path: a micro-batch lasts as long as on its fullest rank."""
    sequences, ranks, budget, hidden = SHIPPED[name]
    layout = Layout(packed=True, attention=1 / (12 * hidden))
    shares = []
    for seed in range(10):
        drawn = np.random.default_rng(seed).lognormal(np.log(850) - 0.32, 0.8, sequences)
        lengths = (300 + np.minimum(drawn, 2048)).astype(int).tolist()
        micros = micro_batches(split_ranks([layout.cost(length) for length in lengths], ranks), lengths, budget, layout)
        path = sum(max(sum(lengths[i] for i in rank[step]) for rank in micros) for step in range(len(micros[0])))
        shares.append(sum(lengths) / (ranks * path))
    assert np.mean(shares) > 0.95, shares
