"""Disk: buckets as files in a directory that all members see. Slow, and possible where no network joins them."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from slurm_rlhf.weights.backends import Done, Incoming, PendingTransfer, TransportFailure, wait_for
from slurm_rlhf.weights.bucket import Pool
from slurm_rlhf.weights.transfer_plan import BucketPart, SyncPlan

_KEY = "part"


class Disk:
    """Write and read files; see `Backend`. A file is renamed when complete, and removed after the next update."""

    device = torch.device("cpu")

    def __init__(self, plan: SyncPlan, rank: int, directory: Path, timeout_s: float) -> None:
        """`directory`: this group's own. Raises OSError."""
        directory.mkdir(parents=True, exist_ok=True)
        self.pool = Pool(self.device)
        self._plan = plan
        self._rank = rank
        self._directory = directory
        self._timeout_s = timeout_s
        self._update = 0
        self._aborted = threading.Event()
        self._mine: list[list[Path]] = [[], []]  # files of the last update, and of this one

    def send(
        self, bucket: int, stream: int, part: BucketPart, buffer: torch.Tensor, apart: Sequence[torch.Tensor] = ()
    ) -> PendingTransfer:
        path = self._path(bucket, stream, part)
        fresh = path.with_suffix(".new")
        try:
            # Other nodes see the file once it is closed (on NFS, too). No fsync: it need not survive a crash.
            save_file({_KEY: buffer}, fresh)
            fresh.rename(path)
        except (OSError, SafetensorError) as error:
            raise TransportFailure(f"{path} cannot be written: {error}", peer_left=False) from error
        self._mine[-1].append(path)
        return Done()

    def receive(self, bucket: int) -> Incoming:
        return Incoming(partial(self._read, bucket, self._plan.stream_to(self._rank)))

    def flush(self) -> None:
        # Only when the next update is over, have all members certainly read the files of this one.
        for path in self._mine.pop(0):
            path.unlink(missing_ok=True)
        self._mine.append([])
        self._update += 1

    def abort(self) -> None:
        self._aborted.set()

    def close(self) -> None:
        self.abort()
        for path in (path for update in self._mine for path in update):
            path.unlink(missing_ok=True)
        with suppress(OSError):  # not empty: others are still here
            self._directory.rmdir()

    def _read(self, bucket: int, stream: int) -> torch.Tensor:
        """Wait for all parts of a bucket, into one buffer."""
        buffer = self.pool.take(self._plan.nbytes(bucket, stream))
        for part in self._plan.parts(bucket, stream):
            path = self._path(bucket, stream, part)
            wait_for(path.exists, self._aborted.is_set, self._timeout_s, f"{path} is not there", (0.001, 0.05))
            try:
                buffer[part.start : part.start + part.nbytes].copy_(load_file(path)[_KEY])
            except (OSError, SafetensorError, RuntimeError) as error:
                raise TransportFailure(f"{path} cannot be read: {error}", peer_left=False) from error
        return buffer

    def _path(self, bucket: int, stream: int, part: BucketPart) -> Path:
        return self._directory / f"{self._update}.{bucket}.{stream}.{part.owner}.safetensors"


def clear(directory: Path, keep: str) -> None:
    """Remove what groups before `keep`, which may have been killed, left in `directory`."""
    for left in directory.glob("*"):
        if left.name != keep:
            shutil.rmtree(left, ignore_errors=True)
