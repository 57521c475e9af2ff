"""IPC on GPUs: an engine rank maps memory of the actor rank that has the same GPU.

Where the actor's ranks hold shards, they gather each bucket among themselves first, over NCCL: so nothing goes over
CPUs, and no process maps, or makes a context on, a GPU that is not its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from msgspec import msgpack
from torch.distributed import Store, Work

from slurm_rlhf.errors import SyncError
from slurm_rlhf.process_groups._torch import open_gpu_memory, share_gpu_memory
from slurm_rlhf.weights.backends import Done, Incoming, PendingTransfer, wait_for
from slurm_rlhf.weights.backends.nccl import NcclCommunicator, in_time
from slurm_rlhf.weights.backends.shared_memory import SharedMemory
from slurm_rlhf.weights.bucket import Pool
from slurm_rlhf.weights.rendezvous import device_name, device_names
from slurm_rlhf.weights.transfer_plan import DEPTH, BucketPart, SyncPlan


@dataclass
class DeviceIpc:
    """Hand buckets over in memory of one GPU; see `Backend`. The plan's nodes are GPUs here.

    An actor rank has `DEPTH` slots there, each for its parts of a bucket, or for the whole bucket where shards are
    gathered. `marks`, a shared memory without room for data, says which slot holds which bucket and who has copied it.
    Where actor ranks hold shards, making a `DeviceIpc` is collective for them, and raises TransportFailure.
    """

    plan: SyncPlan
    rank: int
    store: Store
    marks: SharedMemory | None  # None for an actor rank that hands nothing over
    gathered: bool  # actor ranks hold shards, and have the communicator `gather`
    gather: NcclCommunicator | None
    timeout_s: float

    def __post_init__(self) -> None:
        plan, rank, gather = self.plan, self.rank, self.gather
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.pool = Pool(self.device)
        self._aborted = False
        self._readers = plan.layout.by_node.get(plan.layout.node(rank), ())
        actors = plan.layout.actors
        self._givers = [owner for owner, gpu in enumerate(actors) if gpu == plan.layout.node(rank)]
        self._stream = plan.stream_to(self._readers[0]) if self._readers else 0
        self._number = 0  # number of the first bucket of this update
        self._next = 0  # bucket of this update
        self._slots: list[torch.Tensor] = []  # an actor rank's own
        self._mapped: dict[int, list[torch.Tensor]] = {}  # an engine rank's, by their owner
        self._filling: deque[tuple[int, int, list[Work], Any]] = deque()
        self._copied: deque[tuple[int, Any]] = deque()
        torch.cuda.ipc_collect()  # frees memory of an earlier group that its peers have released
        if rank < len(actors) and (self._readers or gather):
            largest = max(plan.nbytes(bucket, self._stream) for bucket in range(len(plan.buckets)))
            self._slots = [self.pool.take(largest) for _ in range(DEPTH)]
            self.store.set(f"cuda/{rank}", msgpack.encode([device_name(), *map(share_gpu_memory, self._slots)]))
        if gather is not None:
            in_time(lambda: gather.settle(gather.meet(self.device)), self.timeout_s)

    def send(
        self, bucket: int, stream: int, part: BucketPart, buffer: torch.Tensor, apart: Sequence[torch.Tensor] = ()
    ) -> PendingTransfer:
        self._reach(bucket)
        self._fill(bucket, part, buffer)
        return Done()

    def receive(self, bucket: int) -> Incoming:
        return Incoming(partial(self._copy, bucket, self._number + bucket))

    def flush(self) -> None:
        if self.gather is not None:
            self._reach(len(self.plan.buckets))
        self._hand_over(0)
        self._give_back(0)
        self._number += len(self.plan.buckets)
        self._next = 0

    def abort(self) -> None:
        self._aborted = True
        if self.marks is not None:
            self.marks.abort()
        if self.gather is not None:
            self.gather.abort()

    def close(self) -> None:
        self.abort()
        self._slots, self._mapped = [], {}
        torch.cuda.ipc_collect()

    def _copy(self, bucket: int, number: int) -> torch.Tensor:
        """Copy a bucket out of its slot; the slot is given back later, when the GPU has copied it."""
        assert self.marks is not None
        self._give_back(DEPTH - 2)
        nbytes = self.plan.nbytes(bucket, self._stream)
        ranges = [(part.owner, part.start, part.start + part.nbytes) for part in self.plan.parts(bucket, self._stream)]
        if self.gathered:
            ranges = [(self._givers[0], 0, nbytes)]
        self.marks.wait(number, len(ranges))
        buffer = self.pool.take(nbytes)
        for owner, low, high in ranges:
            buffer[low:high].copy_(self._slots_of(owner)[number % DEPTH][low:high])
        self._copied.append((number, torch.cuda.current_stream(self.device).record_event()))
        return buffer

    def _reach(self, bucket: int) -> None:
        """Take part in the gathering of the buckets before this one, of which this rank owns nothing."""
        while self.gather is not None and self._next < bucket:
            self._fill(self._next)

    def _fill(self, bucket: int, part: BucketPart | None = None, buffer: torch.Tensor | None = None) -> None:
        """Put this rank's part into the bucket's slot, gather the others', and hand over the bucket before."""
        number = self._number + bucket
        if self.marks is not None:
            self.marks.slot(number)
        slot = self._slots[number % DEPTH]
        if part is not None and buffer is not None:
            slot[part.start : part.start + part.nbytes].copy_(buffer)
        works: list[Work] = []
        event = None
        if self.gather is not None:
            parts = self.plan.parts(bucket, self._stream)
            works = self.gather.spread([(slot[p.start : p.start + p.nbytes], p.owner) for p in parts])
        else:
            event = torch.cuda.current_stream(self.device).record_event()
        self._filling.append((number, part.index if part and not self.gathered else 0, works, event))
        self._next = bucket + 1
        self._hand_over(1)

    def _hand_over(self, leave: int) -> None:
        """Tell the engine ranks which slots are full, except the last `leave`, on which the GPU still works."""
        while len(self._filling) > leave:
            number, index, works, event = self._filling.popleft()
            if self.gather is not None:
                self.gather.settle(works)
            else:
                self._until(event)
            if self.marks is not None:
                self.marks.mark(number, [index])

    def _give_back(self, leave: int) -> None:
        while self._copied and (len(self._copied) > leave or self._copied[0][1].query()):
            number, event = self._copied.popleft()
            self._until(event)
            assert self.marks is not None
            self.marks.give_back(number, self._readers.index(self.rank))

    def _until(self, event: Any) -> None:
        """Wait for an event, as long as the group lives."""

        wait_for(lambda: bool(event.query()), lambda: self._aborted, self.timeout_s, "a GPU is not done")

    def _slots_of(self, owner: int) -> list[torch.Tensor]:
        if owner not in self._mapped:
            device, *shared = msgpack.decode(self.store.get(f"cuda/{owner}"))
            # The GPU has another number here than in the process of the slot's owner.
            ordinal = ordinal_of(device, device_names(), f"actor {owner}")
            self._mapped[owner] = [open_gpu_memory(ordinal, slot) for slot in shared]
        return self._mapped[owner]


def ordinal_of(device: str, visible: Sequence[str], owner: str) -> int:
    """Return which of the GPUs that this process sees is `device`. Raises SyncError where it sees others only."""
    if device not in visible:
        raise SyncError(
            f"the weights of {owner} are on GPU {device}, and this rank sees {', '.join(visible)} only: sync.backend = "
            "ipc is for roles that share their GPUs (train.colocate_all). Use sync.backend = auto"
        )
    return visible.index(device)
