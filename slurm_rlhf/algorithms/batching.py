"""Spread a batch over the ranks of a role and into micro-batches, and join the results of the ranks.

Deterministic: the same lengths give the same parts.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from slurm_rlhf.algorithms.layout import ROWS, Layout
from slurm_rlhf.records import F32, Experience


def mini_batches(n: int, batch_size: int, seed: int, epoch: int) -> list[list[int]]:
    """Draw the optimizer steps of an epoch: sequences 0 .. n-1, shuffled by (seed, epoch), `batch_size` per step.

    Raises ValueError when batch_size does not divide n: a short last step would weigh its tokens more.
    """
    if batch_size < 1 or n % batch_size:
        raise ValueError(f"{n} sequences do not divide into optimizer steps of {batch_size}")
    order = np.random.default_rng([seed, epoch]).permutation(n)
    return [[int(i) for i in order[start : start + batch_size]] for start in range(0, n, batch_size)]


def split_ranks(costs: Sequence[float], dp_size: int) -> list[list[int]]:
    """Choose the sequences of each rank: the same number for every rank, at about the same cost; indices ascending.

    costs [N]. The most expensive sequence left goes to the rank with the lowest cost that still has room.
    Raises ValueError when dp_size does not divide N.
    Source: Graham, Bounds on Multiprocessing Timing Anomalies (1969), with a bound on the count.
    """
    if dp_size < 1 or len(costs) % dp_size:
        raise ValueError(f"{len(costs)} sequences do not divide over {dp_size} ranks")
    room = len(costs) // dp_size
    ranks: list[list[int]] = [[] for _ in range(dp_size)]
    open_ranks = [(0.0, rank) for rank in range(dp_size)]
    for index in _largest_first(range(len(costs)), costs):
        given, rank = heapq.heappop(open_ranks)
        ranks[rank].append(index)
        if len(ranks[rank]) < room:
            heapq.heappush(open_ranks, (given + costs[index], rank))
    return [sorted(rank) for rank in ranks]


def micro_batches(
    per_rank: Sequence[Sequence[int]], lengths: Sequence[int], max_tokens: int, layout: Layout = ROWS
) -> list[list[list[int]]]:
    """Cut each rank's sequences into micro-batches: result[rank][micro] = indices, the most expensive ones first.

    A micro-batch has at most max_tokens tokens, padding included, unless it is a single sequence. All ranks have the
    same number of micro-batches, none of them empty, because every backward is a collective. The number is about the
    fewest that the fullest rank needs. With a packed layout the micro-batches of a rank cost about the same.
    lengths [N] in tokens, per_rank as `split_ranks` returns it.
    """

    def size(micro: Sequence[int]) -> float:
        sizes = [lengths[index] for index in micro]
        return sum(map(layout.cost, sizes)) if layout.packed else layout.size(sizes)

    cut = _packed if layout.packed else _padded
    result: list[list[list[int]]] = []
    wanted = max((len(cut(indices, lengths, max_tokens, layout, 1)) for indices in per_rank if indices), default=0)
    while len(result) < len(per_rank):
        micros = cut(per_rank[len(result)], lengths, max_tokens, layout, wanted)
        if len(micros) > wanted:  # to fill `wanted` evenly may take more than to fill the fewest: cut all ranks again
            result, wanted = [], len(micros)
            continue
        result.append(sorted(map(sorted, micros), key=lambda micro: (-size(micro), micro)))
    return result


@dataclass(slots=True)
class Shard:
    """Hold the part of a batch that one rank works on."""

    indices: list[int]  # rows of the whole batch, in the order of `experience`
    experience: Experience
    micro: list[list[int]]  # micro-batches, each a list of rows of `experience`; the same number on every rank


def shards(experience: Experience, ranks: int, max_tokens: int, layout: Layout = ROWS) -> list[Shard]:
    """Split a batch over `ranks`, at about the same cost for each; the ranks of a group of `layout.ranks` share a part.

    `max_tokens`: tokens of a micro-batch that one rank computes.
    """
    lengths = [int(length) for length in experience.lengths]
    parts = []
    for rows, micros in zip(*cut_batch(lengths, ranks, max_tokens, layout), strict=True):
        place = {row: position for position, row in enumerate(rows)}
        parts.append(Shard(rows, experience.select(rows), [[place[row] for row in micro] for micro in micros]))
    return [parts[rank // layout.ranks] for rank in range(ranks)]


def cut_batch(
    lengths: Sequence[int], ranks: int, max_tokens: int, layout: Layout
) -> tuple[list[list[int]], list[list[list[int]]]]:
    """Choose the sequences of each group of `layout.ranks` ranks, and cut them into micro-batches.

    `max_tokens`: tokens of a micro-batch that one rank computes. Raises ValueError as `split_ranks` does.
    """
    groups = split_ranks(list(map(layout.cost, lengths)), ranks // layout.ranks)
    return groups, micro_batches(groups, lengths, max_tokens * layout.ranks, layout)


def assemble(experience: Experience, parts: list[Shard], columns: list[F32]) -> F32:
    """Build a column of the whole batch, [A], from the ranks' columns over their own response tokens."""
    whole = np.zeros(int(experience.action_offsets[-1]), dtype=np.float32)
    for shard, column in zip(parts, columns, strict=True):
        whole[experience.actions_of(shard.indices)] = column
    return whole


def _packed(
    indices: Sequence[int], lengths: Sequence[int], max_tokens: int, layout: Layout, count: int
) -> list[list[int]]:
    """Fill at least `count` micro-batches at about the same cost, the longest sequence first."""
    count = max(count, -(-sum(lengths[index] for index in indices) // max_tokens))
    while True:
        micros: list[list[int]] = [[] for _ in range(count)]
        tokens, costs = [0] * count, [0.0] * count
        for index in _largest_first(indices, lengths):
            length = lengths[index]
            room = [number for number in range(count) if tokens[number] + length <= max_tokens or not tokens[number]]
            if not room:
                break
            best = min(room, key=lambda number: costs[number])
            micros[best].append(index)
            tokens[best] += length
            costs[best] += layout.cost(length)
        else:
            return [micro for micro in micros if micro]
        count += 1


def _padded(
    indices: Sequence[int], lengths: Sequence[int], max_tokens: int, layout: Layout, count: int
) -> list[list[int]]:
    """Fill the fewest micro-batches, longest first, since the longest sets the padding; halve some to get `count`."""
    micros: list[list[int]] = []
    for index in _largest_first(indices, lengths):
        if micros and lengths[micros[-1][0]] * (len(micros[-1]) + 1) <= max_tokens:
            micros[-1].append(index)
        else:
            micros.append([index])
    while len(micros) < count:
        several = [micro for micro in micros if len(micro) > 1]
        largest = max(several, key=lambda micro: layout.size([lengths[index] for index in micro]))
        half = len(largest) // 2
        micros.remove(largest)
        micros += [largest[:half], largest[half:]]
    return micros


def _largest_first(indices: Iterable[int], sizes: Sequence[float]) -> list[int]:
    return sorted(indices, key=lambda index: (-sizes[index], index))
