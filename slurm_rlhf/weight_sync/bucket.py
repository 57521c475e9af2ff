"""The bytes of one bucket: written on one side, checked and put together on the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from slurm_rlhf.errors import SyncError
from slurm_rlhf.listing import shortened
from slurm_rlhf.weight_sync.buffers import Pool
from slurm_rlhf.weight_sync.checksum import checksum
from slurm_rlhf.weight_sync.plan import FIXED_HEADER, Parameter, Part, Piece, Span, SyncPlan

Source = Callable[[Span], torch.Tensor]
"""A span of a parameter -> its bytes, uint8 [span.nbytes], on any device."""


def fill(buffer: torch.Tensor, part: Part, bucket: int, version: int, source: Source) -> None:
    """Write a part into `buffer` (uint8 [part.nbytes]): its pieces, and a header with their checksums."""
    sums = []
    for piece in part.pieces:
        offset = piece.offset - part.start
        data = source(piece.span)
        view = buffer[offset : offset + piece.span.nbytes]
        if data.device == buffer.device and _in_lanes(data):
            sums.append(checksum(data, into=view))
        else:
            view.copy_(data)
            sums.append(checksum(_lanes(buffer, offset, piece)))
    header = _header(buffer, len(sums))
    # Filled, not copied: a copy of numbers from the host would wait for the GPU.
    header[0].fill_(version)
    header[1].fill_(bucket)
    header[FIXED_HEADER:].copy_(torch.stack(sums))


def verify(buffer: torch.Tensor, plan: SyncPlan, parts: Sequence[Part], bucket: int, version: int) -> None:
    """Compare the parts of a bucket that arrived with what their owners said of them.

    `buffer` is the bucket's. Waits for a GPU once. Raises SyncError naming the parameters that differ.
    """
    words = []
    for part in parts:
        words.append(_header(buffer[part.start :], len(part.pieces)))
        words.append(torch.stack([checksum(_lanes(buffer, piece.offset, piece)) for piece in part.pieces]))
    found = iter(torch.cat(words).tolist())
    for part in parts:
        said = _said([next(found) for _ in range(FIXED_HEADER + len(part.pieces))], part, bucket, version)
        pairs = zip(part.pieces, said, [next(found) for _ in part.pieces], strict=True)
        wrong = [plan.parameters[piece.span.parameter].name for piece, sent, arrived in pairs if sent != arrived]
        if wrong:
            raise _different(wrong, part, bucket, version)


@dataclass(slots=True)
class Assembly:
    """Parameters out of the pieces of bucket after bucket, compared with what their owners said of them."""

    plan: SyncPlan
    pool: Pool
    _open: torch.Tensor | None = None  # of a parameter that has come in part
    _filled: int = 0

    def parameters(
        self, buffer: torch.Tensor, parts: tuple[Part, ...], bucket: int, version: int
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Those that the bucket in `buffer` completes; one that lies there in one piece is a view of it.

        Raises SyncError as `verify` does, at once.
        """
        verify(buffer, self.plan, parts, bucket, version)
        return self._views(buffer, parts)

    def _views(self, buffer: torch.Tensor, parts: tuple[Part, ...]) -> Iterator[tuple[str, torch.Tensor]]:
        for piece, _ in _in_order(parts):
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
        self, buffer: torch.Tensor, parts: tuple[Part, ...], bucket: int, version: int
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The same, none of them a view: the buffer is free at the end. Each is compared while it is copied, so its
        bytes are read once; raises as `verify` does, before the first that differs."""
        headers = {part.index: _header(buffer[part.start :], len(part.pieces)).tolist() for part in parts}
        said = {part.index: iter(_said(headers[part.index], part, bucket, version)) for part in parts}
        for piece, part in _in_order(parts):
            room = self._room(piece)
            lanes = _lanes(buffer, piece.offset, piece)
            if lanes.numel() == room.numel() and _in_lanes(room):
                found = checksum(lanes, into=room)
            else:
                room.copy_(buffer[piece.offset : piece.offset + piece.span.nbytes])
                found = checksum(lanes)
            parameter = self.plan.parameters[piece.span.parameter]
            if int(found) != next(said[part.index]):  # a part's pieces are in the order of their parameters, too
                raise _different([parameter.name], part, bucket, version)
            whole = self._completed(piece)
            if whole is not None:
                yield parameter.name, _shaped(whole, parameter)
                del whole, room

    def _room(self, piece: Piece) -> torch.Tensor:
        """Where the piece belongs in its parameter."""
        parameter = self.plan.parameters[piece.span.parameter]
        if self._open is None:
            self._open, self._filled = self.pool.take(parameter.nbytes), 0
        if piece.span.low != self._filled:
            raise SyncError(f"{parameter.name}: byte {self._filled} should follow, byte {piece.span.low} came")
        return self._open[piece.span.low : piece.span.high]

    def _completed(self, piece: Piece) -> torch.Tensor | None:
        """The parameter, when `piece` was its last."""
        self._filled = piece.span.high
        if self._filled < self.plan.parameters[piece.span.parameter].nbytes:
            return None
        whole, self._open = self._open, None
        return whole


def _said(header: list[int], part: Part, bucket: int, version: int) -> list[int]:
    """The owner's checksums of its pieces. Raises SyncError for another bucket or version."""
    if header[:FIXED_HEADER] != [version, bucket]:
        raise SyncError(
            f"expected bucket {bucket} of policy version {version}, got bucket {header[1]} of version {header[0]} "
            f"from actor {part.owner}"
        )
    return header[FIXED_HEADER:]


def _different(names: list[str], part: Part, bucket: int, version: int) -> SyncError:
    return SyncError(
        f"checksum of policy version {version} differs from that of actor {part.owner} in "
        f"{shortened(names, 5)} (bucket {bucket})"
    )


def _in_order(parts: tuple[Part, ...]) -> list[tuple[Piece, Part]]:
    pieces = [(piece, part) for part in parts for piece in part.pieces]
    return sorted(pieces, key=lambda each: (each[0].span.parameter, each[0].span.low))


def _shaped(data: torch.Tensor, parameter: Parameter) -> torch.Tensor:
    return data.view(getattr(torch, parameter.dtype)).view(parameter.shape)


def _in_lanes(data: torch.Tensor) -> bool:
    """Whether the bytes can be seen as 64-bit words."""
    return data.numel() % 8 == 0 and data.storage_offset() % 8 == 0


def _header(buffer: torch.Tensor, pieces: int) -> torch.Tensor:
    return buffer[: 8 * (FIXED_HEADER + pieces)].view(torch.int64)


def _lanes(buffer: torch.Tensor, offset: int, piece: Piece) -> torch.Tensor:
    """The piece's bytes and the padding up to whole 64-bit lanes, which travels with them."""
    return buffer[offset : offset + -(-piece.span.nbytes // 8) * 8]
