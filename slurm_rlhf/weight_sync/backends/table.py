"""Which carrier a member has, and the shared memory of its node."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from pathlib import Path

from torch.distributed import PrefixStore

from slurm_rlhf.errors import SyncError
from slurm_rlhf.weight_sync.backends.backend import Carrier
from slurm_rlhf.weight_sync.backends.device_ipc import DeviceIpc
from slurm_rlhf.weight_sync.backends.disk import Disk, clear
from slurm_rlhf.weight_sync.backends.nccl import Nccl
from slurm_rlhf.weight_sync.backends.shared_memory import Shelf, ShelfSizes, reserve
from slurm_rlhf.weight_sync.backends.transport import TransportFailure
from slurm_rlhf.weight_sync.communicator import Communicator, name_interface
from slurm_rlhf.weight_sync.group import SyncGroup
from slurm_rlhf.weight_sync.plan import SyncPlan
from slurm_rlhf.weight_sync.relay import Relay
from slurm_rlhf.weight_sync.routes import routes
from slurm_rlhf.weight_sync.store import read

log = logging.getLogger(__name__)


def carrier_of(group: SyncGroup, plan: SyncPlan) -> Carrier:
    """This member's carrier, which the group aborts and closes. Members make it together.

    Raises SyncError where the backend cannot be used here.
    """
    try:
        carrier = _make(group, plan)
    except (OSError, TransportFailure) as error:
        raise SyncError(f"{group.me}: the {group.backend} backend cannot be used: {error}") from error
    group.adopt(carrier)
    return carrier


def _make(group: SyncGroup, plan: SyncPlan) -> Carrier:
    if group.backend == "nccl":
        name_interface(group.me.interface)
        return Nccl(plan, group.rank, group.store, group.timeout_s)
    if group.backend == "disk":
        if not group.directory:
            raise SyncError(f"group {group.name}: the disk backend needs a directory that all members see")
        directory = Path(group.directory)
        if group.rank == 0:
            clear(directory, group.name)
        return Disk(plan, group.rank, directory / group.name, group.timeout_s)
    if group.backend == "ipc" and group.on_gpus:
        return _on_one_device(group, plan)
    shelf = node_shelf(group, plan)
    if group.backend == "ipc" and shelf is None:
        raise SyncError(f"{group.me}: sync.backend = ipc finds no room in /dev/shm: use auto, or make it larger")
    return Relay(plan, group.rank, group.control, shelf)


def _on_one_device(group: SyncGroup, plan: SyncPlan) -> Carrier:
    actors, gpu = plan.layout.actors, plan.layout.node(group.rank)
    readers = plan.layout.by_node.get(gpu, ())
    owners = tuple(rank for rank, place in enumerate(actors) if place == gpu)
    gathered = plan.layout.zero_stage >= 3 and len(actors) > 1
    writers = owners[:1] if gathered else owners
    marks = None
    if readers and group.rank in (*writers, *readers):
        sizes = ShelfSizes(plan.depth, 8, len(writers), len(readers))
        marks = _shared(group, f"marks/{gpu}", (*writers, *readers), sizes)
        if marks is None:
            raise SyncError(f"{group.me}: sync.backend = ipc finds no room in /dev/shm: use auto, or make it larger")
    gather = None
    if gathered and group.rank in owners:
        name_interface(group.me.interface)
        gather = Communicator(PrefixStore("nccl", group.store), group.rank, len(actors), group.timeout_s)
    return DeviceIpc(plan, group.rank, group.store, marks, gathered, gather, group.timeout_s)


def node_shelf(group: SyncGroup, plan: SyncPlan) -> Shelf | None:
    """The shared memory of this rank's node; None where it is the only member there, or there is no room for it.

    The first engine rank of the node makes it; it loses its name as soon as all have it, so that nothing is left
    behind however the processes end. Raises SyncError.
    """
    node = plan.layout.node(group.rank)
    readers = plan.layout.by_node.get(node, ())
    if not readers:
        return None
    stream = plan.stream_to(readers[0])
    writers = tuple(owner for owner in plan.streams[stream].owners if plan.layout.actors[owner] == node)
    members = (*readers, *writers)
    if len(members) < 2 or group.rank not in members:
        return None
    numbers = range(len(plan.buckets))
    slot = max(plan.nbytes(bucket, stream) for bucket in numbers)
    chunks = max(sum(1 for _ in routes(plan, bucket, stream)) for bucket in numbers)
    return _shared(group, f"shelf/{node}", members, ShelfSizes(plan.depth, slot, chunks, len(readers)))


def _shared(group: SyncGroup, key: str, members: tuple[int, ...], sizes: ShelfSizes) -> Shelf | None:
    path, shelf = "", None
    try:
        if group.rank == members[0]:
            with suppress(OSError):
                path = reserve(sizes)
            group.store.set(f"{key}/path", path)
        else:
            group.wait_for(lambda: group.store.check([f"{key}/path"]), f"the shared memory of {group.me.node}")
            path = read(group.store, f"{key}/path") or ""
        with suppress(OSError):
            shelf = Shelf(path, sizes, group.timeout_s) if path else None
        group.store.set(f"{key}/{group.rank}", "mapped" if shelf else "")
        keys = [f"{key}/{rank}" for rank in members]
        group.wait_for(lambda: group.store.check(keys), f"the other members on {group.me.node}")
        if any(not read(group.store, mapped) for mapped in keys):
            if group.rank == members[0]:
                log.info("%s: no shared memory for weights on %s; they go over sockets", group.name, group.me.node)
            return None
        return shelf
    except RuntimeError as error:
        raise SyncError(f"group {group.name}: the store is gone: {error}") from error
    finally:
        if path and group.rank == members[0]:
            with suppress(OSError):
                os.unlink(path)
