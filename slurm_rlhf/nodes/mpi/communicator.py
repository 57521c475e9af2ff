"""Let the processes of COMM_WORLD find each other and exchange a few small messages. The only user of mpi4py.

Messages are JSON: mpi4py itself would pickle objects. Nothing here spins on the cores that the ranks compute on, as
the blocking calls of MPI do.
"""

from __future__ import annotations

import json
from typing import Any

from slurm_rlhf.errors import CallTimeout, ConfigError
from slurm_rlhf.nodes.mpi.assignment import Launched, check_world
from slurm_rlhf.polling import wait_until
from slurm_rlhf.wire import timeouts

_POLL_S = 0.01


class Communicator:
    """Exchange messages with the other processes of COMM_WORLD."""

    def __init__(self, start: Launched) -> None:
        """Join MPI. Raises ConfigError if mpi4py is missing or COMM_WORLD is not what `start` says."""
        try:
            import mpi4py

            mpi4py.rc(threads=False, finalize=False)
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:
            raise ConfigError(
                f"{start.by} started this, but mpi4py cannot be used ({error}): install it for the MPI of this "
                f"{start.by} (MPICC=mpicc pip install --no-binary=mpi4py mpi4py), or start the run without MPI"
            ) from None
        self._mpi = MPI
        self._comm: Any = MPI.COMM_WORLD
        check_world(start, self._comm.size)

    @property
    def rank(self) -> int:
        return int(self._comm.rank)

    @property
    def size(self) -> int:
        return int(self._comm.size)

    def gather(self, value: Any, timeout_s: float = timeouts.MPI_S) -> list[Any]:
        """Return the `value` of every rank, in rank order. Blocks until all have called it, or raises CallTimeout."""
        mine = json.dumps(value).encode()
        sizes = memoryview(bytearray(8 * self.size)).cast("q")
        here = memoryview(bytearray(8)).cast("q")
        here[0] = len(mine)
        self._wait(self._comm.Iallgather(here, sizes), timeout_s)
        counts = sizes.tolist()
        everything = bytearray(sum(counts))
        places = [sum(counts[:rank]) for rank in range(self.size)]
        kind = self._mpi.BYTE
        self._wait(self._comm.Iallgatherv([mine, kind], [everything, counts, places, kind]), timeout_s)
        return [json.loads(everything[at : at + count]) for at, count in zip(places, counts, strict=True)]

    def broadcast(self, value: Any = None, timeout_s: float = timeouts.MPI_S) -> Any:
        """Return the `value` of rank 0 on every rank. Blocks until rank 0 has called it, or raises CallTimeout."""
        return self.gather(value, timeout_s)[0]

    def leave(self) -> None:
        """Wait for all ranks, then leave MPI. A launcher takes a process that ends without it for a crash."""
        self._wait(self._comm.Ibarrier(), timeouts.MPI_LEAVE_S)
        self._mpi.Finalize()

    def _wait(self, request: Any, timeout_s: float) -> None:
        if not wait_until(request.Test, timeout_s, _POLL_S, _POLL_S):
            raise CallTimeout(
                f"MPI: rank {self.rank} of {self.size} waited {timeout_s:g} s for the others: one of "
                "the processes hangs or never started; the launcher's output says more"
            )
