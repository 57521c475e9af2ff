"""Spread a batch over the ranks of a role and into micro-batches, and put the ranks' answers together again.

Deterministic: the same lengths give the same parts.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from slurm_rlhf.records import F32, Experience


def mini_batches(n: int, batch_size: int, seed: int, epoch: int) -> list[list[int]]:
    """Draw the optimizer steps of an epoch: sequences 0 .. n-1 in an order of (seed, epoch), `batch_size` for each.

    Raises ValueError when batch_size does not divide n: a short last step would weigh its tokens more.
    """
    if batch_size < 1 or n % batch_size:
        raise ValueError(f"{n} sequences do not divide into optimizer steps of {batch_size}")
    order = np.random.default_rng([seed, epoch]).permutation(n)
    return [[int(i) for i in order[start : start + batch_size]] for start in range(0, n, batch_size)]


def split_ranks(lengths: Sequence[int], dp_size: int) -> list[list[int]]:
    """Choose the sequences of each rank: as many for every rank and about as many tokens; indices ascending.

    lengths [N] in tokens. The longest sequence left goes to the rank with the fewest tokens that still has room.
    Raises ValueError when dp_size does not divide N.
    Source: Graham, Bounds on Multiprocessing Timing Anomalies (1969), with a bound on the count.
    """
    if dp_size < 1 or len(lengths) % dp_size:
        raise ValueError(f"{len(lengths)} sequences do not divide over {dp_size} ranks")
    room = len(lengths) // dp_size
    ranks: list[list[int]] = [[] for _ in range(dp_size)]
    open_ranks = [(0, rank) for rank in range(dp_size)]
    for index in _longest_first(range(len(lengths)), lengths):
        tokens, rank = heapq.heappop(open_ranks)
        ranks[rank].append(index)
        if len(ranks[rank]) < room:
            heapq.heappush(open_ranks, (tokens + int(lengths[index]), rank))
    return [sorted(rank) for rank in ranks]


def micro_batches(per_rank: Sequence[Sequence[int]], lengths: Sequence[int], max_tokens: int) -> list[list[list[int]]]:
    """Cut each rank's sequences into micro-batches: result[rank][micro] = indices, largest micro-batches first.

    A micro-batch is padded to its longest sequence; that size (longest * count) is at most max_tokens, unless it is
    a single sequence. All ranks have the same number of micro-batches, none of them empty, because every backward
    is a collective: it is the fewest that the fullest rank can do with.
    lengths [N] in tokens, per_rank as `split_ranks` returns it. Raises ValueError when a rank has too few sequences.
    """
    result = [_pack(indices, lengths, max_tokens) for indices in per_rank]
    wanted = max((len(micros) for micros in result), default=0)
    for rank, micros in enumerate(result):
        if len(per_rank[rank]) < wanted:
            raise ValueError(
                f"rank {rank} has {len(per_rank[rank])} sequences for {wanted} micro-batches; give every rank as many"
            )
        while len(micros) < wanted:
            largest = max((micro for micro in micros if len(micro) > 1), key=lambda micro: _padded(micro, lengths))
            half = len(largest) // 2
            micros.remove(largest)
            micros += [largest[:half], largest[half:]]
        micros.sort(key=lambda micro: (-_padded(micro, lengths), micro))
    return [[sorted(micro) for micro in micros] for micros in result]


@dataclass(slots=True)
class Shard:
    """Hold the part of a batch that one rank works on."""

    indices: list[int]  # rows of the whole batch, in the order of `experience`
    experience: Experience
    micro: list[list[int]]  # micro-batches as rows of `experience`; equally many on every rank


def shards(experience: Experience, ranks: int, max_tokens: int) -> list[Shard]:
    """Split a batch over `ranks` with balanced tokens."""
    lengths = [int(length) for length in experience.lengths]
    per_rank = split_ranks(lengths, ranks)
    parts = []
    for rows, micros in zip(per_rank, micro_batches(per_rank, lengths, max_tokens), strict=True):
        place = {row: position for position, row in enumerate(rows)}
        parts.append(Shard(rows, experience.select(rows), [[place[row] for row in micro] for micro in micros]))
    return parts


def assemble(experience: Experience, parts: list[Shard], columns: list[F32]) -> F32:
    """Put the ranks' columns over their own response tokens together: the column of the whole batch, [A]."""
    whole = np.zeros(int(experience.action_offsets[-1]), dtype=np.float32)
    for shard, column in zip(parts, columns, strict=True):
        whole[experience.actions_of(shard.indices)] = column
    return whole


def _pack(indices: Sequence[int], lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Pack the fewest micro-batches within the budget, longest first: the first of each decides its padding."""
    micros: list[list[int]] = []
    for index in _longest_first(indices, lengths):
        if micros and int(lengths[micros[-1][0]]) * (len(micros[-1]) + 1) <= max_tokens:
            micros[-1].append(index)
        else:
            micros.append([index])
    return micros


def _longest_first(indices: Iterable[int], lengths: Sequence[int]) -> list[int]:
    return sorted(indices, key=lambda index: (-int(lengths[index]), index))


def _padded(micro: Sequence[int], lengths: Sequence[int]) -> int:
    return max(int(lengths[index]) for index in micro) * len(micro)
