"""Spreading a batch over the ranks of a role and putting their answers together again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from slurm_rlhf.algorithms.batching import micro_batches, split_ranks
from slurm_rlhf.records import F32, Experience


@dataclass(slots=True)
class Shard:
    """One rank's part of a batch."""

    indices: list[int]  # rows of the whole batch, in the order of `experience`
    experience: Experience
    micro: list[list[int]]  # micro-batches as rows of `experience`; equally many on every rank

    def to_wire(self) -> dict[str, Any]:
        return {"experience": self.experience.to_wire(), "micro": self.micro}


def shards(experience: Experience, ranks: int, max_tokens: int) -> list[Shard]:
    """Split a batch over `ranks` with balanced tokens; deterministic."""
    lengths = [int(length) for length in experience.lengths]
    per_rank = split_ranks(lengths, ranks)
    parts = []
    for rows, micros in zip(per_rank, micro_batches(per_rank, lengths, max_tokens), strict=True):
        place = {row: position for position, row in enumerate(rows)}
        parts.append(Shard(rows, experience.select(rows), [[place[row] for row in micro] for micro in micros]))
    return parts


def assemble(experience: Experience, parts: list[Shard], columns: list[F32]) -> F32:
    """Each rank's column over its own response tokens -> the column over the whole batch, [A]."""
    offsets = experience.action_offsets
    whole = np.zeros(int(offsets[-1]), dtype=np.float32)
    for shard, column in zip(parts, columns, strict=True):
        mine = shard.experience.action_offsets
        for place, row in enumerate(shard.indices):
            whole[offsets[row] : offsets[row + 1]] = column[mine[place] : mine[place + 1]]
    return whole
