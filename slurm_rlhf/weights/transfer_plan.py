"""Which bytes of which parameter travel in which bucket, and from whom. Pure data, the same on both ends.

Parameters are laid end to end in layer order and cut into buckets; what of a bucket one actor rank owns is a part:

    int64 version | int64 bucket | int64 checksum of each piece | padding | piece | padding | piece | ...

A bucket's buffer is its parts, one after the other. A parameter that lies in one piece is used where it arrived; one
that is cut, because ranks own shards of it or because it is larger than a bucket, is put together.

Where chunks go between hosts, each by itself (`TransferLayout.chunked`), large parameters lie apart, before the parts:
each piece, at most a chunk, is sent from where the actor has it, and shards of several ranks arrive side by side.

`TransferLayout` says who takes part and where, as all members know it: the group counts the ranks of the actor first,
as the actor does, and then the ranks of the engines.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slurm_rlhf.errors import SyncError


@dataclass(frozen=True, slots=True)
class Stream:
    """Name a copy of the model on its way: who owns its bytes, and which nodes it goes to."""

    owners: tuple[int, ...]  # actor ranks; each sends a part of every bucket
    nodes: tuple[str, ...]  # nodes with engines; each takes every byte once


@dataclass(frozen=True, slots=True)
class TransferLayout:
    """List the nodes of the members by rank in the group: `actors[i]` is that of rank i, `engines[i]` of rank A + i."""

    actors: tuple[str, ...]
    engines: tuple[str, ...]
    zero_stage: int = 0
    chunked: bool = False  # the backend moves each chunk by itself, from anywhere to anywhere in a host's memory

    @property
    def world(self) -> int:
        return len(self.actors) + len(self.engines)

    def node(self, rank: int) -> str:
        """Return the node of a rank of the group."""
        return (self.actors + self.engines)[rank]

    @property
    def by_node(self) -> dict[str, tuple[int, ...]]:
        """Return the engine ranks of each node, nodes in the order in which they come first."""
        found: dict[str, tuple[int, ...]] = {}
        for rank, node in enumerate(self.engines, len(self.actors)):
            found[node] = (*found.get(node, ()), rank)
        return found


def streams(layout: TransferLayout) -> tuple[Stream, ...]:
    """Return one stream from all actor ranks to all nodes where each rank holds a shard of its own (ZeRO-3).

    Where every rank holds the whole model, nodes that host both roles are served by their own actor ranks, and
    nothing of theirs crosses the network.
    """
    everybody = tuple(range(len(layout.actors)))
    served = tuple(layout.by_node)
    if layout.zero_stage >= 3:
        return (Stream(everybody, served),)
    found: dict[tuple[int, ...], tuple[str, ...]] = {}
    for node in served:
        owners = tuple(rank for rank in everybody if layout.actors[rank] == node) or everybody
        found[owners] = (*found.get(owners, ()), node)
    return tuple(Stream(owners, nodes) for owners, nodes in found.items())


ALIGN = 64
"""Alignment in bytes: every piece starts at a multiple, so that a view of any dtype on it is legal, and fast."""
FIXED_HEADER = 2
"""Count of int64 words of a part's header before the checksums: version and bucket index."""
CHUNK = 8 << 20
"""Size in bytes of what a rank sends at a time."""
_APART = 128 << 10
"""Bytes of a piece from which on its parameter lies apart: copying a smaller one costs less than a message."""
DEPTH = 3
"""Count of buckets that an engine rank has memory for: one is loaded, one comes in, one for unequally fast ranks."""
ITEM_SIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
_ALIASES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True, slots=True)
class Parameter:
    name: str
    shape: tuple[int, ...]
    dtype: str  # a key of ITEM_SIZE

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * ITEM_SIZE[self.dtype]


@dataclass(frozen=True, slots=True)
class Span:
    """Name the bytes `low` to `high` of a parameter, laid out flat."""

    parameter: int  # its index in the plan
    low: int
    high: int

    @property
    def nbytes(self) -> int:
        return self.high - self.low


@dataclass(frozen=True, slots=True)
class Piece:
    span: Span
    offset: int  # bytes from the start of the bucket's buffer; a multiple of ALIGN where it does not lie apart
    apart: bool = False  # it lies outside of its part's range of the buffer


@dataclass(frozen=True, slots=True)
class BucketPart:
    """Describe what one actor rank sends of a bucket."""

    owner: int  # rank in the group
    index: int  # its index among the parts of the bucket
    start: int  # bytes from the start of the bucket's buffer
    nbytes: int  # header and padding included, pieces apart not; a multiple of ALIGN
    pieces: tuple[Piece, ...]

    @property
    def apart(self) -> tuple[Piece, ...]:
        """Return the pieces that lie apart, in the order of the buffer."""
        return tuple(piece for piece in self.pieces if piece.apart)


@dataclass(frozen=True, slots=True)
class SyncPlan:
    parameters: tuple[Parameter, ...]
    buckets: tuple[tuple[Span, ...], ...]
    layout: TransferLayout
    streams: tuple[Stream, ...]
    chunk_bytes: int
    _parts: dict[tuple[int, int], tuple[BucketPart, ...]] = field(default_factory=dict, compare=False, repr=False)

    @property
    def payload(self) -> int:
        """Return the bytes of the parameters."""
        return sum(parameter.nbytes for parameter in self.parameters)

    @property
    def described(self) -> list[list[Any]]:
        """Return what the plan was made of: [[name, shape, dtype], ...]."""
        return [[p.name, list(p.shape), p.dtype] for p in self.parameters]

    def stream_to(self, rank: int) -> int:
        """Return the index of the stream that reaches an engine rank."""
        node = self.layout.node(rank)
        return next(index for index, stream in enumerate(self.streams) if node in stream.nodes)

    def parts(self, bucket: int, stream: int) -> tuple[BucketPart, ...]:
        """Return who sends what of a bucket in a stream, without those who own nothing of it."""
        key = (bucket, stream)
        if key not in self._parts:
            owners, spans = self.streams[stream].owners, self.buckets[bucket]
            if self.layout.zero_stage >= 3:
                owned = _shards(spans, self.parameters, len(owners))
            else:
                owned = _equal(spans, len(owners))
            apart = _apart(spans, owned) if self.layout.chunked else ({}, 0)
            mine = [(owner, spans) for owner, spans in zip(owners, owned, strict=True) if spans]
            self._parts[key] = _lay_out(mine, *apart, self.chunk_bytes)
        return self._parts[key]

    def nbytes(self, bucket: int, stream: int) -> int:
        """Return the size of the bucket's buffer."""
        last = self.parts(bucket, stream)[-1]
        return last.start + last.nbytes

    def fingerprint(self) -> str:
        """Return a text that is equal where two members would do the same."""
        text = repr((self.described, self.buckets, self.layout, self.chunk_bytes))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def make_plan(
    described: Sequence[Sequence[Any]], bucket_bytes: int, layout: TransferLayout, chunk_bytes: int = CHUNK
) -> SyncPlan:
    """Plan the transfer of parameters [[name, shape, dtype], ...] over `layout`, in buckets up to `bucket_bytes`.

    An engine rank has three times `bucket_bytes` for buckets, and room for a parameter that is put together.
    Raises SyncError for a dtype that is not fp32, bf16 or fp16.
    """
    parameters = tuple(Parameter(name, tuple(map(int, shape)), dtype_name(dtype)) for name, shape, dtype in described)
    buckets = tuple(_buckets(parameters, bucket_bytes // ALIGN * ALIGN))
    return SyncPlan(parameters, buckets, layout, streams(layout), chunk_bytes)


def dtype_name(dtype: Any) -> str:
    """Write `fp32`, `float32` or `torch.float32` as `float32`. Raises SyncError for one that cannot be sent."""
    name = str(dtype).removeprefix("torch.")
    name = _ALIASES.get(name, name)
    if name not in ITEM_SIZE:
        raise SyncError(f"weights of dtype {dtype} cannot be sent; valid: {', '.join(ITEM_SIZE)}")
    return name


def _buckets(parameters: Sequence[Parameter], limit: int) -> list[tuple[Span, ...]]:
    """Fill buckets with whole parameters; one larger than a bucket has buckets to itself."""
    buckets: list[tuple[Span, ...]] = []
    current: list[Span] = []
    size = 0
    for index, parameter in enumerate(parameters):
        if current and size + parameter.nbytes > limit:
            buckets.append(tuple(current))
            current, size = [], 0
        low = 0
        while parameter.nbytes - low > limit:
            buckets.append((Span(index, low, low + limit),))
            low += limit
        current.append(Span(index, low, parameter.nbytes))
        size += parameter.nbytes - low
    return [*buckets, tuple(current)]


def _shards(spans: Sequence[Span], parameters: Sequence[Parameter], owners: int) -> list[list[Span]]:
    """Cut as ZeRO-3 does: rank r owns elements r * s to (r + 1) * s of a flat parameter of n, s = ceil(n / ranks)."""
    owned: list[list[Span]] = [[] for _ in range(owners)]
    for span in spans:
        parameter = parameters[span.parameter]
        step = -(-parameter.numel // owners) * ITEM_SIZE[parameter.dtype]
        for owner in range(span.low // step if step else 0, owners):
            low, high = max(span.low, owner * step), min(span.high, (owner + 1) * step)
            if low >= span.high:
                break
            owned[owner].append(Span(span.parameter, low, high))
    _place_empty(spans, owned)
    return owned


def _equal(spans: Sequence[Span], owners: int) -> list[list[Span]]:
    """Cut where every rank holds everything: into equal parts, as far as ALIGN allows."""
    total = sum(span.nbytes for span in spans)
    owned: list[list[Span]] = [[] for _ in range(owners)]
    start = 0
    for span in spans:
        cuts = [min(max((total * i // owners - start) // ALIGN * ALIGN, 0), span.nbytes) for i in range(owners)]
        for owner, (low, high) in enumerate(zip(cuts, [*cuts[1:], span.nbytes], strict=True)):
            if high > low:
                owned[owner].append(Span(span.parameter, span.low + low, span.low + high))
        start += span.nbytes
    _place_empty(spans, owned)
    return owned


def _place_empty(spans: Sequence[Span], owned: list[list[Span]]) -> None:
    """Give parameters without elements, which have bytes nowhere, to the first rank."""
    empty = [span for span in spans if span.nbytes == 0]
    owned[0] = sorted(owned[0] + empty, key=lambda span: (span.parameter, span.low))


def _apart(spans: Sequence[Span], owned: Sequence[Sequence[Span]]) -> tuple[dict[int, int], int]:
    """Return the offset in the buffer of the first byte of each large parameter, and that of the rest after them.

    The offset is negative if the parameter begins in an earlier bucket. One in many small shards is not large.
    """
    large = {span.parameter for whole in owned for span in whole if span.nbytes >= _APART}
    places, end = {}, 0
    for span in spans:
        if span.parameter in large:
            places[span.parameter] = end - span.low
            end += _aligned(span.nbytes)
    return places, end


def _lay_out(
    owned: list[tuple[int, list[Span]]], places: Mapping[int, int], start: int, size: int
) -> tuple[BucketPart, ...]:
    """Lay out the parts from byte `start` on. `places`: offsets of parameters apart, in pieces up to `size` bytes."""
    parts = []
    for index, (owner, whole) in enumerate(owned):
        spans = [cut for span in whole for cut in (_cut(span, size) if span.parameter in places else [span])]
        offset = start + _aligned(8 * (FIXED_HEADER + len(spans)))
        pieces = []
        for span in spans:
            if span.parameter in places:
                pieces.append(Piece(span, places[span.parameter] + span.low, apart=True))
                continue
            pieces.append(Piece(span, offset))
            offset += _aligned(span.nbytes)
        parts.append(BucketPart(owner, index, start, offset - start, tuple(pieces)))
        start = offset
    return tuple(parts)


def _cut(span: Span, size: int) -> list[Span]:
    return [Span(span.parameter, low, min(low + size, span.high)) for low in range(span.low, span.high, size)]


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN
