"""Make the backend that the members agreed on, and the shared memory of a node."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from pathlib import Path

from torch.distributed import PrefixStore

from slurm_rlhf.errors import SyncError
from slurm_rlhf.weights.backends import Backend, TransportFailure
from slurm_rlhf.weights.backends.device_ipc import DeviceIpc
from slurm_rlhf.weights.backends.disk import Disk, clear
from slurm_rlhf.weights.backends.gloo import Gloo
from slurm_rlhf.weights.backends.nccl import Nccl, NcclCommunicator, name_interface
from slurm_rlhf.weights.backends.shared_memory import SharedMemory, SharedMemorySizes, reserve
from slurm_rlhf.weights.group import SyncGroup
from slurm_rlhf.weights.rendezvous import read
from slurm_rlhf.weights.routes import routes
from slurm_rlhf.weights.transfer_plan import DEPTH, SyncPlan

log = logging.getLogger(__name__)


def make_backend(group: SyncGroup, plan: SyncPlan) -> Backend:
    """Make this member's backend, which the group aborts and closes. All members do so together.

    Raises SyncError where the backend cannot be used here.
    """
    try:
        backend = _make(group, plan)
    except (OSError, TransportFailure) as error:
        raise SyncError(f"{group.me}: the {group.backend} backend cannot be used: {error}") from error
    group.adopt(backend)
    return backend


def _make(group: SyncGroup, plan: SyncPlan) -> Backend:
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
    memory = memory_of_node(group, plan)
    if group.backend == "ipc" and memory is None:
        raise _no_room(group)
    return Gloo(plan, group.rank, group.control, memory)


def _no_room(group: SyncGroup) -> SyncError:
    return SyncError(f"{group.me}: sync.backend = ipc finds no room in /dev/shm: use auto, or make it larger")


def _on_one_device(group: SyncGroup, plan: SyncPlan) -> Backend:
    actors, gpu = plan.layout.actors, plan.layout.node(group.rank)
    readers = plan.layout.by_node.get(gpu, ())
    owners = tuple(rank for rank, place in enumerate(actors) if place == gpu)
    gathered = plan.layout.zero_stage >= 3 and len(actors) > 1
    writers = owners[:1] if gathered else owners
    marks = None
    if readers and group.rank in (*writers, *readers):
        sizes = SharedMemorySizes(DEPTH, 8, len(writers), len(readers))
        marks = _shared(group, f"marks/{gpu}", (*writers, *readers), sizes)
        if marks is None:
            raise _no_room(group)
    gather = None
    if gathered and group.rank in owners:
        name_interface(group.me.interface)
        gather = NcclCommunicator(PrefixStore("nccl", group.store), group.rank, len(actors), group.timeout_s)
    return DeviceIpc(plan, group.rank, group.store, marks, gathered, gather, group.timeout_s)


def memory_of_node(group: SyncGroup, plan: SyncPlan) -> SharedMemory | None:
    """Share memory among the ranks of this rank's node; None where it is alone there, or there is no room.

    The first engine rank of the node makes it, and unlinks it as soon as all have mapped it, so that nothing is left
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
    return _shared(
        group, f"memory/{node}/{plan.fingerprint()}", members, SharedMemorySizes(DEPTH, slot, chunks, len(readers))
    )


def _shared(group: SyncGroup, key: str, members: tuple[int, ...], sizes: SharedMemorySizes) -> SharedMemory | None:
    path, memory = "", None
    try:
        if group.rank == members[0]:
            with suppress(OSError):
                path = reserve(sizes)
            group.store.set(f"{key}/path", path)
        else:
            group.wait_for(lambda: group.store.check([f"{key}/path"]), f"the shared memory of {group.me.node}")
            path = read(group.store, f"{key}/path") or ""
        with suppress(OSError):
            memory = SharedMemory(path, sizes, group.timeout_s) if path else None
        group.store.set(f"{key}/{group.rank}", "mapped" if memory else "")
        keys = [f"{key}/{rank}" for rank in members]
        group.wait_for(lambda: group.store.check(keys), f"the other members on {group.me.node}")
        if any(not read(group.store, mapped) for mapped in keys):
            if group.rank == members[0]:
                log.info("%s: no shared memory for weights on %s; they go over sockets", group.name, group.me.node)
            return None
        return memory
    except RuntimeError as error:
        raise SyncError(f"group {group.name}: the store is gone: {error}") from error
    finally:
        if path and group.rank == members[0]:
            with suppress(OSError):
                os.unlink(path)
