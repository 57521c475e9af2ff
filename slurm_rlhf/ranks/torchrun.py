"""torchrun with a store that listens on one address: `python -m slurm_rlhf.ranks.torchrun` takes torchrun's options.

torch's own ways for torchruns to meet open the store on all addresses of the node, and whoever reaches a store can
change it: it has no authentication. This one is bound to the address that the others connect to.

When a rank ends, torchrun ends the others by SIGTERM and waits for them. In a Slurm step that signal means preemption,
and ranks block it. This one kills them, so that the end of the first is reported at once.
"""

from __future__ import annotations

import os
import signal
import socket
import traceback
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.multiprocessing import SubprocessContext
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.run import main as torchrun

from slurm_rlhf.cluster.network import listening, own_address
from slurm_rlhf.cluster.processes import PARENT, STORE_FD, raise_descriptors
from slurm_rlhf.wire import timeouts

BACKEND = "bound"
"""Value of torchrun's `--rdzv-backend`; its `--rdzv-conf` has `rank`, of this node."""


class BoundRendezvous(RendezvousHandler):
    """Let the torchruns of a role meet at the store of the first; the nodes have the numbers they were given."""

    def __init__(self, host: str, port: int, run_id: str, node: int, nodes: int) -> None:
        self._where = RendezvousStoreInfo(host, port)
        self._run_id = run_id
        self._node = node
        self._nodes = nodes
        self._store: TCPStore | None = None

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """Say that the ranks use this store, too."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Open the store, or connect to it. Raises torch's errors, or TimeoutError, after a time-out."""
        if self._store is None:
            self._store = self._listen() if self._node == 0 else self._connect()
        store = PrefixStore(self._run_id, self._store)
        return RendezvousInfo(store, self._node, self._nodes, self._where)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Nothing to do: nodes neither come nor go."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True

    def _connect(self) -> TCPStore:
        where = self._where
        return TCPStore(
            where.master_addr, where.master_port, self._nodes, False, timedelta(seconds=timeouts.TORCHRUN_S)
        )

    def _listen(self) -> TCPStore:
        known = os.environ.pop(STORE_FD, "")  # others know its port already
        address = own_address(self._where.master_addr, os.environ.get("GLOO_SOCKET_IFNAME", ""))
        listener = socket.socket(fileno=int(known)) if known else listening(address)
        address, port = listener.getsockname()[:2]
        self._where = RendezvousStoreInfo(address, port)
        if self._nodes > 1:
            print(f"the torchruns meet at {address}:{self._where.master_port}", flush=True)
        return TCPStore(
            *(address, port, self._nodes, True, timedelta(seconds=timeouts.TORCHRUN_S)),
            master_listen_fd=listener.detach(),
        )


def make(parameters: RendezvousParameters) -> BoundRendezvous:
    """Make the rendezvous that torchrun's options describe."""
    host, _, port = parameters.endpoint.rpartition(":")
    node = parameters.get_as_int("rank", 0) or 0
    return BoundRendezvous(host, int(port), parameters.run_id, node, parameters.max_nodes)


def kill_all(ranks: SubprocessContext, death_sig: signal.Signals | None = None, timeout: float = 0.0) -> None:
    """Replace `SubprocessContext.close`: end the ranks by force, and do not wait for those that the kernel keeps."""
    for rank in ranks.subprocess_handlers.values():
        if rank.proc.poll() is None:
            rank.close(signal.SIGKILL)


def main() -> None:
    SubprocessContext.close = kill_all
    rendezvous_handler_registry.register(BACKEND, make)
    os.environ[PARENT] = str(os.getpid())
    raise_descriptors()
    failed = False
    try:
        torchrun()
    except Exception:
        failed = True
        traceback.print_exc()
    os._exit(failed)  # the interpreter's teardown of torch takes a second, and many on a busy node


if __name__ == "__main__":
    main()
