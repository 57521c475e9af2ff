"""Be the ranks of a node in the collectives: `python -m slurm_rlhf.nodes.group_rank SOCKET PIPE PARENT`.

Imports torch once and forks a process for each rank, so that a node of eight ranks costs one import. No model is
loaded. An order is a line of the input, a report a line in PIPE; SOCKET is where the store listens.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from slurm_rlhf.cluster.processes import die_with_parent
from slurm_rlhf.wire import timeouts

Tell = Callable[[dict[str, Any]], object]

_POLL_S = 0.02
_ENOUGH_S = 0.3  # an operation that takes longer is not repeated
_SMALL = 5  # repeats of the smallest message
SIZE = {"gloo": 2 << 20, "nccl": 64 << 20}
"""Bytes of the large message."""


def main() -> None:
    listening, reports, parent = map(int, sys.argv[1:])
    die_with_parent(parent)
    warnings.filterwarnings("ignore")
    import torch  # noqa: F401

    for line in sys.stdin:
        measure(json.loads(line), listening, lambda report: os.write(reports, f"{json.dumps(report)}\n".encode()))


def measure(order: dict[str, Any], listening: int, tell: Tell) -> None:
    """Fork a process for each rank that `order` lists, and end those that are not through after `limit_s`."""
    children = {_fork(order, process, visible, listening, tell): process for process, _, visible in order["processes"]}
    end = time.monotonic() + order["limit_s"]
    while children:
        child, _ = os.waitpid(-1, os.WNOHANG)
        children.pop(child, None)
        if not child:
            if time.monotonic() > end:
                for late in children:
                    os.kill(late, signal.SIGKILL)
            time.sleep(_POLL_S)
    tell({"end": True})


def _fork(order: dict[str, Any], process: int, visible: dict[str, str], listening: int, tell: Tell) -> int:
    parent = os.getpid()
    child = os.fork()
    if child:
        return child
    try:
        die_with_parent(parent)
        os.environ.update(visible)
        _take_part(order, process, listening, tell)
    finally:
        os._exit(0)  # the error was sent; nothing of the parent's may run twice
    raise AssertionError("not reached")


def _take_part(order: dict[str, Any], process: int, listening: int, tell: Tell) -> None:
    """Go through the stages. A group that fails does not end it: the later pairs of a node are measured, too."""
    import torch
    from torch.distributed import TCPStore

    from slurm_rlhf.process_groups._torch import protect, signed

    protect(order["secret"])
    torch.set_num_threads(1)
    end = time.monotonic() + order["limit_s"]
    first = process == 0
    own_socket = {"master_listen_fd": os.dup(listening)} if first else {}
    limit = timedelta(seconds=order["limit_s"])
    # An error here is not reported: without the store nothing is known of any group.
    store = TCPStore(order["host"], order["port"], is_master=first, wait_for_workers=False, timeout=limit, **own_socket)
    groups = [group for stage in order["stages"] for group in stage]
    for name, processes in [group for group in groups if process in group[1]]:
        own = signed(store, f"{order['name']}/{name}")
        rank = processes.index(process)
        if not _together(own, rank, len(processes), end, timeouts.GROUP_S[order["backend"]]):
            tell({"process": process, "group": name, "late": True})
            continue
        tell({"process": process, "group": name, "together": True})
        try:
            tell({"process": process, "group": name, **_measure(order, own, rank, len(processes))})
        except Exception as error:
            tell({"process": process, "group": name, "error": str(error).strip().splitlines()[0][:300]})
    store.add("through", 1)
    end = time.monotonic() + timeouts.GROUP_LEAVE_S
    while first and store.add("through", 0) < order["processes_in_all"] and time.monotonic() < end:
        time.sleep(_POLL_S)  # the store is here, and others are not through with it


def _together(store: Any, rank: int, world: int, end: float, group_s: float) -> bool:
    """Wait for all members of a group; its first rank says whether they came, with enough time left."""
    store.add("here", 1)
    while rank == 0:
        late = time.monotonic() > end - 2 * group_s
        if late or store.add("here", 0) == world:
            store.set("go", "no" if late else "yes")
            break
        time.sleep(_POLL_S)
    while not store.check(["go"]):
        if time.monotonic() > end:
            return False
        time.sleep(_POLL_S)
    return bool(store.get("go") == b"yes")


def _measure(order: dict[str, Any], store: Any, rank: int, world: int) -> dict[str, float]:
    """Join a group, and return the seconds of the smallest all-reduce, of a large one and of a large broadcast."""
    import torch
    from torch.distributed import BroadcastOptions

    from slurm_rlhf.process_groups._torch import gloo_group, nccl_group

    on_gpu = order["backend"] == "nccl"
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
        group = nccl_group(store, rank, world, timeouts.GROUP_S[order["backend"]])
    else:
        group = gloo_group(store, rank, world, order["address"], timeouts.GROUP_S[order["backend"]])
    from_first = BroadcastOptions()
    from_first.rootRank = 0
    small = torch.ones(1, device=device)
    size = SIZE[order["backend"]]
    large = torch.ones(size // 4, device=device)

    def took(begin: Callable[[], Any]) -> float:
        start = time.perf_counter()
        begin().wait()
        if on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter() - start

    def all_reduce(tensor: torch.Tensor) -> float:
        return took(lambda: group.allreduce([tensor]))

    def broadcast(tensor: torch.Tensor) -> float:
        return took(lambda: group.broadcast([tensor], from_first))

    def best(operation: Callable[[torch.Tensor], float]) -> float:
        """Measure twice if the first rank found it quick: libraries connect for the first large message."""
        found = operation(large)
        slow = torch.tensor([float(found > _ENOUGH_S)], device=device)
        broadcast(slow)
        return found if slow.item() else min(found, operation(large))

    all_reduce(small)  # connects all ranks
    latency = sorted(all_reduce(small) for _ in range(_SMALL))[_SMALL // 2]
    figures = {"latency_s": latency, "there_s": best(all_reduce), "back_s": best(broadcast), "size": size}
    all_reduce(small)  # nobody leaves before all are through
    return figures


if __name__ == "__main__":
    main()
