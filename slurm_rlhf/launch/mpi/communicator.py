"""MPI's COMM_WORLD, for finding each other and for a few words now and then. The one user of mpi4py.

What travels is JSON: mpi4py's own way for objects is pickle. Nothing here spins, as MPI's blocking calls do, on cores
that the ranks compute on.
"""

from __future__ import annotations

import json
from typing import Any

from slurm_rlhf.errors import CallTimeout, ConfigError
from slurm_rlhf.launch.mpi.environment import Launched, check_world
from slurm_rlhf.polling import wait_until

_POLL_S = 0.01
_LATE_S = 60.0


class World:
    """A communicator: COMM_WORLD itself, or a split of it."""

    def __init__(self, start: Launched) -> None:
        """Joins MPI. Raises ConfigError where mpi4py is missing or COMM_WORLD is not what `start` says."""
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

    def gather(self, value: Any, timeout_s: float = _LATE_S) -> list[Any]:
        """Everybody's `value`, in rank order. Blocks until all have called it; CallTimeout when that takes longer."""
        mine = json.dumps(value).encode()
        sizes = memoryview(bytearray(8 * self.size)).cast("q")
        here = memoryview(bytearray(8)).cast("q")
        here[0] = len(mine)
        self._wait(self._comm.Iallgather(here, sizes), "gather", timeout_s)
        counts = sizes.tolist()
        everything = bytearray(sum(counts))
        places = [sum(counts[:rank]) for rank in range(self.size)]
        kind = self._mpi.BYTE
        self._wait(self._comm.Iallgatherv([mine, kind], [everything, counts, places, kind]), "gather", timeout_s)
        return [json.loads(everything[at : at + count]) for at, count in zip(places, counts, strict=True)]

    def broadcast(self, value: Any = None, timeout_s: float = _LATE_S) -> Any:
        """Rank 0's `value`, on every rank. Blocks until rank 0 has called it; CallTimeout when that takes longer."""
        data = json.dumps(value).encode() if self.rank == 0 else b""
        size = memoryview(bytearray(8)).cast("q")
        size[0] = len(data)
        self._wait(self._comm.Ibcast(size, root=0), "broadcast", timeout_s)
        buffer = bytearray(data) if self.rank == 0 else bytearray(size[0])
        self._wait(self._comm.Ibcast([buffer, self._mpi.BYTE], root=0), "broadcast", timeout_s)
        return json.loads(buffer)

    def split(self, color: int) -> World:
        """The ranks that called it with the same `color`, in their order here."""
        part = World.__new__(World)
        part._mpi, part._comm = self._mpi, self._comm.Split(color, self.rank)
        return part

    def tell(self, rank: int, value: Any) -> None:
        """Send a few words to `rank`; they arrive in order. Blocks for as long as it takes to hand them over."""
        self._wait(self._comm.Isend([json.dumps(value).encode(), self._mpi.BYTE], dest=rank), "word", _LATE_S)

    def hear(self) -> tuple[int, Any] | None:
        """(rank, its words), if somebody told something; does not block."""
        status = self._mpi.Status()
        if not self._comm.Iprobe(source=self._mpi.ANY_SOURCE, tag=self._mpi.ANY_TAG, status=status):
            return None
        words = bytearray(status.Get_count(self._mpi.BYTE))
        self._comm.Recv([words, self._mpi.BYTE], source=status.source, tag=status.tag)
        return status.source, json.loads(words)

    def leave(self, timeout_s: float = _LATE_S) -> None:
        """Wait for all ranks, then leave MPI. A launcher takes a process that ends without it for a crash."""
        self._wait(self._comm.Ibarrier(), "barrier", timeout_s)
        self._mpi.Finalize()

    def _wait(self, request: Any, what: str, timeout_s: float) -> None:
        if not wait_until(request.Test, timeout_s, _POLL_S, _POLL_S):
            raise CallTimeout(
                f"MPI: rank {self.rank} of {self.size} waited {timeout_s:g} s for the others in a {what}: one of "
                "the processes hangs or never started; the launcher's output says more"
            )
