"""Buckets between processes on the GPUs of a node: engine ranks map the owner's memory. Not run yet: no GPU."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import Store

from slurm_rlhf.errors import SyncError
from slurm_rlhf.sync.buffers import Pool
from slurm_rlhf.sync.carrier import Incoming
from slurm_rlhf.sync.nccl import device_name, device_names
from slurm_rlhf.sync.plan import Part, SyncPlan
from slurm_rlhf.sync.shelf import Shelf
from slurm_rlhf.sync.transport import Pending


class _Copied:
    def wait(self) -> None:
        pass


class _Mapped:
    """A bucket that the owners have or will have in their slots."""

    lent = False

    def __init__(self, ipc: DeviceIpc, bucket: int, number: int) -> None:
        self._ipc = ipc
        self._bucket = bucket
        self._number = number

    def wait(self) -> torch.Tensor:
        return self._ipc.copy(self._bucket, self._number)

    def release(self) -> None:
        pass


class DeviceIpc:
    """See `Carrier`. `marks` is a shelf without room: it says which slot holds which bucket, and who has copied it."""

    def __init__(self, plan: SyncPlan, rank: int, store: Store, marks: Shelf, readers: tuple[int, ...]) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.pool = Pool(self.device)
        self._plan = plan
        self._rank = rank
        self._store = store
        self._marks = marks
        self._readers = readers
        self._stream = plan.stream_to(readers[0])
        self._number = 0
        self._slots: dict[int, list[torch.Tensor]] = {}
        if rank < len(plan.layout.actors):
            largest = max(part.nbytes for b in range(len(plan.buckets)) for part in plan.parts(b, self._stream))
            slots = [torch.empty(largest, dtype=torch.uint8, device=self.device) for _ in range(plan.depth)]
            self._slots[rank] = slots
            store.set(f"cuda/{rank}", json.dumps([device_name(), *(_handle(slot) for slot in slots)]))

    def send(self, bucket: int, stream: int, part: Part, buffer: torch.Tensor) -> Pending:
        number = self._number + bucket
        self._marks.slot(number)
        self._slots[self._rank][number % self._plan.depth][: part.nbytes].copy_(buffer)
        torch.cuda.synchronize(self.device)
        self._marks.mark(number, [part.index])
        return _Copied()

    def receive(self, bucket: int) -> Incoming:
        return _Mapped(self, bucket, self._number + bucket)

    def copy(self, bucket: int, number: int) -> torch.Tensor:
        """A bucket out of its owners' slots."""
        parts = self._plan.parts(bucket, self._stream)
        self._marks.wait(number, len(parts))
        buffer = self.pool.take(self._plan.nbytes(bucket, self._stream))
        for part in parts:
            slot = self._owner(part.owner)[number % self._plan.depth]
            buffer[part.start : part.start + part.nbytes].copy_(slot[: part.nbytes])
        torch.cuda.synchronize(self.device)
        self._marks.give_back(number, self._readers.index(self._rank))
        return buffer

    def flush(self) -> None:
        self._number += len(self._plan.buckets)

    def abort(self) -> None:
        self._marks.abort()

    def close(self) -> None:
        self.abort()
        self._slots = {}

    def _owner(self, rank: int) -> list[torch.Tensor]:
        if rank not in self._slots:
            device, *handles = json.loads(self._store.get(f"cuda/{rank}"))
            ordinal = ordinal_of(device, device_names(), f"actor {rank}")
            self._slots[rank] = [_open(handle, ordinal) for handle in handles]
        return self._slots[rank]


def _handle(tensor: torch.Tensor) -> list[Any]:
    """What another process needs to map the tensor's memory."""
    return [
        {"bytes": base64.b64encode(item).decode()} if isinstance(item, bytes) else item
        for item in tensor.untyped_storage()._share_cuda_()
    ]


def ordinal_of(device: str, visible: Sequence[str], owner: str) -> int:
    """Which of the GPUs that this process sees is `device`. Raises SyncError where it sees another's only."""
    if device not in visible:
        raise SyncError(
            f"the weights of {owner} are on GPU {device}, and this rank sees {', '.join(visible)} only: sync.backend = "
            "ipc is for roles that share their GPUs (train.colocate_all). Use sync.backend = auto"
        )
    return visible.index(device)


def _open(handle: list[Any], ordinal: int) -> torch.Tensor:
    """Memory on the GPU that is number `ordinal` here; the handle's own number is that of the process that made it."""
    fields = [base64.b64decode(item["bytes"]) if isinstance(item, dict) else item for item in handle]
    storage = torch.UntypedStorage._new_shared_cuda(ordinal, *fields[1:])
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
