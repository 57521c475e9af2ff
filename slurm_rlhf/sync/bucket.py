"""The bytes of one bucket: written on one side, checked and put together on the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from slurm_rlhf.errors import SyncError
from slurm_rlhf.sync.buffers import Pool
from slurm_rlhf.sync.checksum import checksum
from slurm_rlhf.sync.plan import FIXED_HEADER, Part, Piece, Span, SyncPlan

Source = Callable[[Span], torch.Tensor]
"""A span of a parameter -> its bytes, uint8 [span.nbytes], on any device."""


def fill(buffer: torch.Tensor, part: Part, bucket: int, version: int, source: Source) -> None:
    """Write a part into `buffer` (uint8 [part.nbytes]): its pieces, and a header with their checksums."""
    sums = []
    for piece in part.pieces:
        offset = piece.offset - part.start
        view = buffer[offset : offset + piece.span.nbytes]
        view.copy_(source(piece.span))
        sums.append(checksum(_lanes(buffer, offset, piece)))
    header = torch.tensor([version, bucket], dtype=torch.int64, device=buffer.device)
    _header(buffer, len(sums)).copy_(torch.cat([header, torch.stack(sums)]))


def verify(buffer: torch.Tensor, plan: SyncPlan, part: Part, bucket: int, version: int) -> None:
    """Compare a part of a bucket that arrived with what its owner said of it.

    `buffer` is the bucket's. Raises SyncError naming the parameters that differ.
    """
    sums = torch.stack([checksum(_lanes(buffer, piece.offset, piece)) for piece in part.pieces])
    header = _header(buffer[part.start :], len(part.pieces)).tolist()
    if header[:FIXED_HEADER] != [version, bucket]:
        raise SyncError(
            f"expected bucket {bucket} of policy version {version}, got bucket {header[1]} of version {header[0]} "
            f"from actor {part.owner}"
        )
    pairs = zip(part.pieces, header[FIXED_HEADER:], sums.tolist(), strict=True)
    wrong = [plan.parameters[piece.span.parameter].name for piece, sent, arrived in pairs if sent != arrived]
    if wrong:
        more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise SyncError(
            f"checksum of policy version {version} differs from that of actor {part.owner} in "
            f"{', '.join(wrong[:5])}{more} (bucket {bucket})"
        )


@dataclass(slots=True)
class Assembly:
    """Parameters out of the pieces of bucket after bucket."""

    plan: SyncPlan
    pool: Pool
    _open: torch.Tensor | None = None  # of a parameter that has come in part
    _filled: int = 0

    def parameters(
        self, buffer: torch.Tensor, parts: tuple[Part, ...], copy: bool = False
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Those that the bucket in `buffer` completes. Without `copy`, one that lies there in one piece is a view."""
        pieces = sorted(
            (piece for part in parts for piece in part.pieces), key=lambda p: (p.span.parameter, p.span.low)
        )
        for piece in pieces:
            data = buffer[piece.offset : piece.offset + piece.span.nbytes]
            parameter = self.plan.parameters[piece.span.parameter]
            if copy or piece.span.nbytes < parameter.nbytes:
                whole = self._add(data, piece, parameter.nbytes)
                if whole is None:
                    continue
                data = whole
            yield parameter.name, data.view(getattr(torch, parameter.dtype)).view(parameter.shape)

    def _add(self, data: torch.Tensor, piece: Piece, nbytes: int) -> torch.Tensor | None:
        if self._open is None:
            self._open, self._filled = self.pool.take(nbytes), 0
        if piece.span.low != self._filled:
            name = self.plan.parameters[piece.span.parameter].name
            raise SyncError(f"{name}: byte {self._filled} should follow, byte {piece.span.low} came")
        self._open[piece.span.low : piece.span.high].copy_(data)
        self._filled = piece.span.high
        if self._filled < nbytes:
            return None
        whole, self._open = self._open, None
        return whole


def _header(buffer: torch.Tensor, pieces: int) -> torch.Tensor:
    return buffer[: 8 * (FIXED_HEADER + pieces)].view(torch.int64)


def _lanes(buffer: torch.Tensor, offset: int, piece: Piece) -> torch.Tensor:
    """The piece's bytes and the padding up to whole 64-bit lanes, which travels with them."""
    return buffer[offset : offset + -(-piece.span.nbytes // 8) * 8]
