"""The bytes of one bucket: memory for them, their checksums, how they are written and put together again."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from xxhash import xxh3_64

from slurm_rlhf.errors import SyncError, shortened
from slurm_rlhf.weights.transfer_plan import FIXED_HEADER, BucketPart, Parameter, Piece, Span, SyncPlan

_PIECE = 1 << 20  # bytes that are copied and hashed at a time: they stay in a second-level cache in between
_BLOCK = 1 << 20  # words that a device sums at a time: more take more memory, fewer take more launches
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # 2^64 / golden ratio, odd: the multiplier of Fibonacci hashing


def checksum(data: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
    """Compute a checksum of `data` (uint8 [n]; on a device n is a multiple of 8), as an int64 tensor [] on its device.

    With `into` (uint8 [n]) the bytes are copied there, and the checksum is that of the copy.
    """
    if _is_cpu(data):
        return torch.tensor(host_checksum(data, into))
    return _weighted(data, into)


def host_checksum(data: torch.Tensor, into: torch.Tensor | None = None) -> int:
    """Compute `checksum` of bytes on a host, XXH3, as an int64. It releases the interpreter's lock."""
    state = xxh3_64()
    if into is None:
        state.update(data.numpy())
    else:
        for low in range(0, data.numel(), _PIECE):
            here = into[low : low + _PIECE]
            here.copy_(data[low : low + _PIECE])
            state.update(here.numpy())
    found = state.intdigest()
    return found - (found >> 63 << 64)


def _weighted(data: torch.Tensor, into: torch.Tensor | None) -> torch.Tensor:
    """Sum over i, j of x[i, j] * w[j] * g^(n - 1 - i) mod 2^64.

    x are the bytes as 64-bit words in n blocks, w and g odd: integer arithmetic that depends on positions, the same on
    every device.
    """
    words = data.view(torch.int64)
    copied = words if into is None else into.view(torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    for low in range(0, words.numel(), _BLOCK):
        here = copied[low : low + _BLOCK]
        if into is not None:
            here.copy_(words[low : low + _BLOCK])
        total = total * _GOLDEN + (here * _weights(str(data.device))[: here.numel()]).sum()
    return total


def _is_cpu(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"


@cache
def _weights(device: str) -> torch.Tensor:
    """Make the weights of the words of a block: odd, no two alike."""
    numbers = torch.arange(1, _BLOCK + 1, dtype=torch.int64) * _GOLDEN
    return ((numbers ^ (numbers >> 29)) * _GOLDEN | 1).to(device)


SpanSource = Callable[[Span], torch.Tensor]
"""A span of a parameter -> its bytes, uint8 [span.nbytes], on any device."""

_NOTHING: Mapping[int, int] = {}
_WASTE = 2  # most times that a block may be as large as the request that gets it


class Pool:
    """Hand out uint8 tensors [n]; their memory is used again when the last view is gone, whoever has kept it.

    On CPUs the first touch of fresh pages costs more than the transfer of their bytes.
    """

    def __init__(self, device: torch.device, others: int = 0) -> None:
        """`others`: bytes of the owner's shared memory, which count, too."""
        self.device = device
        self.peak = others  # most bytes held at a time, free blocks included
        self._held = others
        self._lock = threading.Lock()
        self._returned: deque[torch.Tensor] = deque()
        self._gone: deque[int] = deque()
        self._free: list[torch.Tensor] = []

    def take(self, nbytes: int) -> torch.Tensor:
        """Hand out a tensor of `nbytes`, its contents undefined. Any thread."""
        if self.device.type != "cpu":
            return self._fresh_on_gpu(nbytes)
        with self._lock:
            while self._returned:
                self._free.append(self._returned.popleft())
            fitting = [block for block in self._free if nbytes <= block.numel() <= _WASTE * max(nbytes, 1)]
            if fitting:
                block = min(fitting, key=torch.Tensor.numel)
                self._free = [other for other in self._free if other is not block]
            else:
                block = torch.empty(max(nbytes, 1), dtype=torch.uint8)
                self._hold(block.numel())
        # The tensor and all views of it keep this array, and nothing else does.
        lent = block.numpy()[:nbytes]
        # A finalizer runs wherever the last reference goes, even inside `take`, so it must not take the lock.
        weakref.finalize(lent, self._returned.append, block).atexit = False
        return torch.from_numpy(lent)

    def _fresh_on_gpu(self, nbytes: int) -> torch.Tensor:
        """Allocate on the GPU: torch's caching allocator uses freed memory again by itself."""
        tensor = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        with self._lock:
            while self._gone:
                self._held -= self._gone.popleft()
            self._hold(nbytes)
        # All views share the storage, and its object lives as long as they.
        weakref.finalize(tensor.untyped_storage(), self._gone.append, nbytes).atexit = False
        return tensor

    def _hold(self, nbytes: int) -> None:
        self._held += nbytes
        self.peak = max(self.peak, self._held)


def fill(
    buffer: torch.Tensor, part: BucketPart, bucket: int, version: int, source: SpanSource, pool: Pool
) -> list[torch.Tensor]:
    """Write a part into `buffer` (uint8 [part.nbytes]): its pieces, and a header with their checksums.

    Returns the bytes of the pieces that lie apart: the actor's own, or a copy from `pool` if they are on a device.
    """
    sums = []
    apart = []
    for piece in part.pieces:
        offset = piece.offset - part.start
        data = source(piece.span)
        if piece.apart:
            apart.append(data if data.device == buffer.device else pool.take(piece.span.nbytes).copy_(data))
            sums.append(checksum(apart[-1]))
            continue
        view = buffer[offset : offset + piece.span.nbytes]
        if data.device == buffer.device and (_is_cpu(data) or _in_words(data)):
            sums.append(checksum(data, into=view))
        else:
            view.copy_(data)
            sums.append(checksum(_words(buffer, offset, piece)))
    header = _header(buffer, len(sums))
    # Filled, not copied: a copy of numbers from the host would wait for the GPU.
    header[0].fill_(version)
    header[1].fill_(bucket)
    header[FIXED_HEADER:].copy_(torch.stack(sums))
    return apart


def verify(
    buffer: torch.Tensor,
    plan: SyncPlan,
    parts: Sequence[BucketPart],
    bucket: int,
    version: int,
    known: Mapping[int, int] = _NOTHING,
) -> None:
    """Compare the parts of a bucket that arrived with the checksums of their owners.

    `buffer`: that of the bucket. `known`: offset of a piece -> its checksum, if it is computed already. Waits for a GPU
    once. Raises SyncError naming the parameters that differ.
    """
    words = []
    for part in parts:
        words.append(_header(buffer[part.start :], len(part.pieces)))
        words.append(torch.stack([_arrived(buffer, piece, known) for piece in part.pieces]))
    found = iter(torch.cat(words).tolist())
    for part in parts:
        header = [next(found) for _ in range(FIXED_HEADER + len(part.pieces))]
        sums = [next(found) for _ in part.pieces]
        pairs = zip(part.pieces, _checksums(header, part, bucket, version), sums, strict=True)
        wrong = [plan.parameters[piece.span.parameter].name for piece, said, arrived in pairs if said != arrived]
        if wrong:
            raise _different(wrong, part, bucket, version)


def _arrived(buffer: torch.Tensor, piece: Piece, known: Mapping[int, int]) -> torch.Tensor:
    """Return the checksum of a piece as it arrived, int64 []."""
    if piece.offset in known:
        return torch.tensor(known[piece.offset])
    return checksum(_words(buffer, piece.offset, piece))


@dataclass(slots=True)
class Assembly:
    """Put parameters together from the pieces of bucket after bucket, and compare their checksums."""

    plan: SyncPlan
    pool: Pool
    _open: torch.Tensor | None = None  # memory of a parameter that has come in part

    def parameters(
        self,
        buffer: torch.Tensor,
        parts: tuple[BucketPart, ...],
        bucket: int,
        version: int,
        known: Mapping[int, int] = _NOTHING,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the parameters that the bucket in `buffer` completes; one that lies there in one piece as a view.

        Calls `verify` at once, before the first is asked for.
        """
        verify(buffer, self.plan, parts, bucket, version, known)
        return self._views(buffer, parts)

    def _views(self, buffer: torch.Tensor, parts: tuple[BucketPart, ...]) -> Iterator[tuple[str, torch.Tensor]]:
        for piece in _side_by_side([piece for piece, _ in _in_order(parts)]):
            data = buffer[piece.offset : piece.offset + piece.span.nbytes]
            parameter = self.plan.parameters[piece.span.parameter]
            if piece.span.nbytes < parameter.nbytes:
                self._room(piece).copy_(data)
                whole = self._completed(piece)
                if whole is None:
                    continue
                data = whole
            yield parameter.name, _shaped(data, parameter)

    def copies(
        self, buffer: torch.Tensor, parts: tuple[BucketPart, ...], bucket: int, version: int
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the same parameters, as copies: the buffer, in host memory, is free at the end.

        Each is compared while it is copied, so its bytes are read once; raises as `verify` does, before it yields the
        first that differs.
        """
        headers = {part.index: _header(buffer[part.start :], len(part.pieces)).tolist() for part in parts}
        sums = {part.index: iter(_checksums(headers[part.index], part, bucket, version)) for part in parts}
        for piece, part in _in_order(parts):
            room = self._room(piece)
            found = host_checksum(buffer[piece.offset : piece.offset + piece.span.nbytes], into=room)
            parameter = self.plan.parameters[piece.span.parameter]
            if found != next(sums[part.index]):  # a part's pieces are in the order of their parameters, too
                raise _different([parameter.name], part, bucket, version)
            whole = self._completed(piece)
            if whole is not None:
                yield parameter.name, _shaped(whole, parameter)
                del whole, room

    def _room(self, piece: Piece) -> torch.Tensor:
        """Return where the piece belongs in its parameter."""
        if self._open is None:
            self._open = self.pool.take(self.plan.parameters[piece.span.parameter].nbytes)
        return self._open[piece.span.low : piece.span.high]

    def _completed(self, piece: Piece) -> torch.Tensor | None:
        """Return the parameter if `piece` was its last."""
        if piece.span.high < self.plan.parameters[piece.span.parameter].nbytes:
            return None
        whole, self._open = self._open, None
        return whole


def _checksums(header: list[int], part: BucketPart, bucket: int, version: int) -> list[int]:
    """Read the owner's checksums of its pieces. Raises SyncError for another bucket or version."""
    if header[:FIXED_HEADER] != [version, bucket]:
        raise SyncError(
            f"expected bucket {bucket} of policy version {version}, got bucket {header[1]} of version {header[0]} "
            f"from actor {part.owner}"
        )
    return header[FIXED_HEADER:]


def _different(names: list[str], part: BucketPart, bucket: int, version: int) -> SyncError:
    return SyncError(
        f"checksum of policy version {version} differs from that of actor {part.owner} in "
        f"{shortened(names, 5)} (bucket {bucket})"
    )


def _in_order(parts: tuple[BucketPart, ...]) -> list[tuple[Piece, BucketPart]]:
    pieces = [(piece, part) for part in parts for piece in part.pieces]
    return sorted(pieces, key=lambda each: (each[0].span.parameter, each[0].span.low))


def _side_by_side(pieces: Sequence[Piece]) -> list[Piece]:
    """Join pieces of a parameter that follow each other in the buffer."""
    found: list[Piece] = []
    for piece in pieces:
        last = found[-1].span if found else None
        if last and piece.apart and (piece.span.parameter, piece.span.low) == (last.parameter, last.high):
            found[-1] = replace(found[-1], span=replace(last, high=piece.span.high))
        else:
            found.append(piece)
    return found


def _shaped(data: torch.Tensor, parameter: Parameter) -> torch.Tensor:
    return data.view(getattr(torch, parameter.dtype)).view(parameter.shape)


def _in_words(data: torch.Tensor) -> bool:
    """Tell whether the bytes can be seen as 64-bit words."""
    return data.numel() % 8 == 0 and data.storage_offset() % 8 == 0


def _header(buffer: torch.Tensor, pieces: int) -> torch.Tensor:
    return buffer[: 8 * (FIXED_HEADER + pieces)].view(torch.int64)


def _words(buffer: torch.Tensor, offset: int, piece: Piece) -> torch.Tensor:
    """Return the bytes for a piece's checksum: on a device with the padding up to whole 64-bit words."""
    if _is_cpu(buffer):
        return buffer[offset : offset + piece.span.nbytes]
    return buffer[offset : offset + -(-piece.span.nbytes // 8) * 8]
