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


def micro_batches(
    per_rank: Sequence[Sequence[int]],
    lengths: Sequence[int],
    max_tokens: int,
    groups: Sequence[Sequence[int]] | None = None,
) -> list[list[list[int]]]:
    """Cut each rank's sequences into micro-batches: result[rank][micro] = indices, largest micro-batches first.

    A micro-batch is padded to its longest sequence; that size (longest * count) is at most max_tokens, unless it is
    a single sequence. All ranks have the same number of micro-batches, none of them empty, because every backward
    is a collective: it is the fewest that the fullest rank can do with. With `groups`, parts of the sequences, those of
    a group are neighbours, and mostly in one micro-batch.
    lengths [N] in tokens, per_rank as `split_ranks` returns it. Raises ValueError when a rank has too few sequences.
    """
    lead = _leads(groups or [], lengths)
    result = [_pack(indices, lengths, max_tokens, lead) for indices in per_rank]
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


def shards(experience: Experience, ranks: int, max_tokens: int, together: bool = False) -> list[Shard]:
    """Split a batch over `ranks` with balanced tokens.

    together: sequences with the same prompt go to one rank, where groups are equal in size and divide over the ranks,
    and mostly into one micro-batch.
    """
    lengths = [int(length) for length in experience.lengths]
    groups = same_prompts(experience) if together else []
    if groups and len(groups) % ranks == 0 and len({len(group) for group in groups}) == 1:
        dealt = split_ranks([sum(lengths[row] for row in group) for group in groups], ranks)
        per_rank = [sorted(row for number in part for row in groups[number]) for part in dealt]
    else:
        per_rank = split_ranks(lengths, ranks)
    parts = []
    for rows, micros in zip(per_rank, micro_batches(per_rank, lengths, max_tokens, groups), strict=True):
        place = {row: position for position, row in enumerate(rows)}
        parts.append(Shard(rows, experience.select(rows), [[place[row] for row in micro] for micro in micros]))
    return parts


def same_prompts(experience: Experience) -> list[list[int]]:
    """List the rows of each prompt, prompts in the order of their first rows."""
    groups: dict[bytes, list[int]] = {}
    starts = zip(experience.token_offsets, experience.prompt_lens, strict=False)
    for row, (start, length) in enumerate(starts):
        groups.setdefault(experience.token_ids[start : start + length].tobytes(), []).append(row)
    return list(groups.values())


def assemble(experience: Experience, parts: list[Shard], columns: list[F32]) -> F32:
    """Put the ranks' columns over their own response tokens together: the column of the whole batch, [A]."""
    whole = np.zeros(int(experience.action_offsets[-1]), dtype=np.float32)
    for shard, column in zip(parts, columns, strict=True):
        whole[experience.actions_of(shard.indices)] = column
    return whole


def _leads(groups: Sequence[Sequence[int]], lengths: Sequence[int]) -> dict[int, int]:
    """Return the longest sequence of each one's group."""
    leads = ((_longest_first(group, lengths)[0], group) for group in groups if group)
    return {index: lead for lead, group in leads for index in group}


def _pack(indices: Sequence[int], lengths: Sequence[int], max_tokens: int, lead: dict[int, int]) -> list[list[int]]:
    """Pack few micro-batches within the budget, longest first.

    Without `lead` the first of each decides its padding, and they are the fewest. Sequences with the same `lead` follow
    each other, in the place of the longest.
    """
    micros: list[list[int]] = []
    longest = 0  # of the last of them
    leads: dict[int, int] = {index: lead.get(index, index) for index in indices}
    place = {index: number for number, index in enumerate(_longest_first(set(leads.values()), lengths))}
    for index in sorted(_longest_first(indices, lengths), key=lambda index: place[leads[index]]):
        longest = max(longest, int(lengths[index]))
        if micros and longest * (len(micros[-1]) + 1) <= max_tokens:
            micros[-1].append(index)
        else:
            micros.append([index])
            longest = int(lengths[index])
    return micros


def _longest_first(indices: Iterable[int], lengths: Sequence[int]) -> list[int]:
    return sorted(indices, key=lambda index: (-int(lengths[index]), index))


def _padded(micro: Sequence[int], lengths: Sequence[int]) -> int:
    return max(int(lengths[index]) for index in micro) * len(micro)
