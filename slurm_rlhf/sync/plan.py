"""Which bytes of which parameter travel in which bucket. Pure data, computed once, the same on both ends.

A bucket is one flat run of bytes: a header, then whole parameters in their order.

    int64 version | int64 bucket index | int64 checksum of each parameter | padding | parameter | padding | ...

A parameter larger than the bucket size has a bucket to itself: engines load whole tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slurm_rlhf.errors import SyncError

ALIGN = 64
"""Bytes; every parameter starts at a multiple, so that a view of any dtype on it is legal, and fast."""
FIXED_HEADER = 2
"""int64 words of the header before the checksums: version and bucket index."""

ITEM_SIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
_ALIASES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True, slots=True)
class Entry:
    """One parameter in its bucket."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # a key of ITEM_SIZE
    offset: int  # bytes from the start of the bucket

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_SIZE[self.dtype]


@dataclass(frozen=True, slots=True)
class Bucket:
    entries: tuple[Entry, ...]
    nbytes: int  # header and padding included; a multiple of ALIGN


@dataclass(frozen=True, slots=True)
class SyncPlan:
    buckets: tuple[Bucket, ...]

    @property
    def described(self) -> list[list[Any]]:
        """What the plan was made of: [[name, shape, dtype], ...]."""
        return [[e.name, list(e.shape), e.dtype] for bucket in self.buckets for e in bucket.entries]

    @property
    def nbytes(self) -> int:
        """Bytes of one update on the wire."""
        return sum(bucket.nbytes for bucket in self.buckets)

    @property
    def largest(self) -> int:
        """Bytes of the largest bucket."""
        return max(bucket.nbytes for bucket in self.buckets)

    def to_wire(self) -> list[list[list[Any]]]:
        """Buckets of [name, shape, dtype]; offsets follow from them."""
        return [[[e.name, list(e.shape), e.dtype] for e in bucket.entries] for bucket in self.buckets]

    @classmethod
    def from_wire(cls, wire: list[list[list[Any]]]) -> SyncPlan:
        return cls(tuple(_bucket([_parameter(item) for item in bucket]) for bucket in wire))


_Parameter = tuple[str, tuple[int, ...], str]


def make_plan(described: Sequence[Sequence[Any]], bucket_bytes: int) -> SyncPlan:
    """Cut parameters [[name, shape, dtype], ...] into buckets of about `bucket_bytes`, in their order.

    Raises SyncError for a name given twice, a dtype that is not fp32, bf16 or fp16, and for no parameters at all.
    """
    buckets: list[Bucket] = []
    current: list[_Parameter] = []
    size = 0
    seen: set[str] = set()
    for item in described:
        parameter = _parameter(item)
        name, shape, dtype = parameter
        if name in seen:
            raise SyncError(f"the parameter list names {name!r} twice; tied parameters are sent once, under one name")
        seen.add(name)
        nbytes = math.prod(shape) * ITEM_SIZE[dtype]
        if current and size + nbytes > bucket_bytes:
            buckets.append(_bucket(current))
            current, size = [], 0
        current.append(parameter)
        size += nbytes
    if not current:
        raise SyncError("the parameter list is empty: there is nothing to send to the engines")
    return SyncPlan((*buckets, _bucket(current)))


def check_match(sent: Sequence[Sequence[Any]], expected: Sequence[Sequence[Any]], sender: str, receiver: str) -> None:
    """Raise SyncError unless both ends have the same names with the same shapes; dtypes may differ.

    `sender` and `receiver` name the two ends in the message.
    """
    ours = {name: tuple(shape) for name, shape, _ in expected}
    theirs = {name: tuple(shape) for name, shape, _ in sent}
    lines = [f"  {name}: only {sender} has it" for name in theirs if name not in ours]
    lines += [f"  {name}: only {receiver} has it" for name in ours if name not in theirs]
    lines += [
        f"  {name}: {list(theirs[name])} at {sender}, {list(shape)} at {receiver}"
        for name, shape in ours.items()
        if theirs.get(name, shape) != shape
    ]
    if lines:
        more = f"\n  and {len(lines) - 8} more" if len(lines) > 8 else ""
        raise SyncError(
            f"{sender} and {receiver} do not hold the same architecture:\n"
            + "\n".join(lines[:8])
            + more
            + "\nBoth must be started from the same model directory (actor.model_name_or_path)."
        )


def dtype_name(dtype: Any) -> str:
    """`fp32`, `float32` or `torch.float32` as `float32`. Raises SyncError for one that cannot be sent."""
    name = str(dtype).removeprefix("torch.")
    name = _ALIASES.get(name, name)
    if name not in ITEM_SIZE:
        raise SyncError(f"weights of dtype {dtype} cannot be sent; valid: {', '.join(ITEM_SIZE)}")
    return name


def _parameter(item: Sequence[Any]) -> _Parameter:
    name, shape, dtype = item
    return name, tuple(int(n) for n in shape), dtype_name(dtype)


def _bucket(parameters: list[_Parameter]) -> Bucket:
    offset = _aligned(8 * (FIXED_HEADER + len(parameters)))
    entries = []
    for parameter in parameters:
        entry = Entry(*parameter, offset)
        entries.append(entry)
        offset += _aligned(entry.nbytes)
    return Bucket(tuple(entries), offset)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN
