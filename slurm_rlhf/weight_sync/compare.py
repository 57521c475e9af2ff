"""Every byte of a few parameters, compared by SHA-256: what a checksum of 64 bits cannot vouch for.

Owners publish the digest of each of their pieces in the group's store; receivers compare them with the parameter as the
engine got it. Which parameters follows from the version, so that in time all have their turn.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass

import torch
from torch.distributed import Store

from slurm_rlhf.errors import SyncError
from slurm_rlhf.weight_sync.group import SyncGroup
from slurm_rlhf.weight_sync.plan import Part, Span, SyncPlan
from slurm_rlhf.weight_sync.store import read


def sampled(plan: SyncPlan, version: int, count: int) -> frozenset[int]:
    """Indices of the parameters that are compared in the update to `version`: `count` of them, or all there are."""
    parameters = range(len(plan.parameters))
    return frozenset(random.Random(version).sample(parameters, min(count, len(parameters))))


def publish(store: Store, plan: SyncPlan, part: Part, buffer: torch.Tensor, version: int, count: int) -> None:
    """The owner's half; `buffer` is its part. Raises SyncError when the store is gone."""
    wanted = sampled(plan, version, count) if count else frozenset()
    for piece in part.pieces:
        if piece.span.parameter in wanted:
            offset = piece.offset - part.start
            try:
                store.set(_key(piece.span), f"{version} {_digest(buffer[offset : offset + piece.span.nbytes])}")
            except RuntimeError as error:
                raise SyncError(f"the weight transfer's store is gone: {error}") from error


@dataclass(frozen=True, slots=True)
class Sample:
    """A parameter that a receiver compares."""

    group: SyncGroup
    name: str
    spans: tuple[Span, ...]  # its pieces

    def check(self, tensor: torch.Tensor, version: int) -> None:
        """Raises SyncError when it is not, byte for byte, what its owners sent."""
        data = tensor.reshape(-1).view(torch.uint8)
        for span in self.spans:
            said = self._said(_key(span), version)
            if said != f"{version} {_digest(data[span.low : span.high])}":
                raise SyncError(
                    f"{self.name} of policy version {version} differs from the sender's in bytes {span.low} to "
                    f"{span.high}, though its checksum agreed"
                )

    def _said(self, key: str, version: int) -> str:
        found: list[str] = []

        def came() -> bool:
            found[:] = [read(self.group.store, key) or ""]
            return found[0].startswith(f"{version} ")

        self.group.wait_for(came, f"the digest of {self.name}")
        return found[0]


def samples_of(group: SyncGroup, plan: SyncPlan, stream: int, version: int, count: int) -> dict[str, Sample]:
    """name -> what an engine rank of `stream` has to compare in an update."""
    wanted = sampled(plan, version, count) if count else frozenset()
    spans: dict[int, list[Span]] = {index: [] for index in wanted}
    for bucket, held in enumerate(plan.buckets):
        if wanted.isdisjoint(span.parameter for span in held):
            continue
        for piece in (piece for part in plan.parts(bucket, stream) for piece in part.pieces):
            if piece.span.parameter in wanted:
                spans[piece.span.parameter].append(piece.span)
    names = {index: plan.parameters[index].name for index in wanted}
    return {names[index]: Sample(group, names[index], tuple(found)) for index, found in spans.items()}


def _key(span: Span) -> str:
    return f"digest/{span.parameter}/{span.low}/{span.high}"


def _digest(data: torch.Tensor) -> str:
    return hashlib.sha256(data.cpu().numpy()).hexdigest()
