"""NCCL: between GPUs, one rank each."""

from __future__ import annotations

import time
from datetime import timedelta

import torch
from torch.distributed import PrefixStore, Store, Work

from slurm_rlhf.sync.transport import Pending, TransportFailure

_POLL_S = 0.0005


def nccl_available() -> bool:
    return torch.cuda.is_available() and torch.distributed.is_nccl_available()


class _NcclPending:
    def __init__(self, transport: NcclTransport, work: Work, buffer: torch.Tensor) -> None:
        self._transport = transport
        self._work = work
        self._buffer = buffer
        self._deadline = time.monotonic() + transport.timeout_s

    def wait(self) -> None:
        # Work.wait() only orders streams; a peer that left would show as a hang of the next kernel.
        while not self._work.is_completed():
            if self._transport.aborted:
                raise TransportFailure("the NCCL group was aborted", peer_left=False)
            if time.monotonic() > self._deadline:
                raise TransportFailure(f"NCCL: not done after {self._transport.timeout_s:g} s", peer_left=False)
            time.sleep(_POLL_S)
        try:
            self._work.wait()
        except RuntimeError as error:
            raise TransportFailure(str(error), peer_left="remote" in str(error)) from error


class NcclTransport:
    """See `Transport`. Uses the current CUDA device; needs `nccl_available()`."""

    def __init__(self, store: Store, rank: int, world: int, timeout_s: float) -> None:
        from torch.distributed import ProcessGroupNCCL

        options = ProcessGroupNCCL.Options()
        # NCCL's own watchdog ends the whole process; ours raises, and has to be first.
        options._timeout = timedelta(seconds=2 * timeout_s + 60)
        self.timeout_s = timeout_s
        self.aborted = False
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._group = ProcessGroupNCCL(PrefixStore("nccl", store), rank, world, options)

    def broadcast(self, buffer: torch.Tensor, root: int) -> Pending:
        return _NcclPending(self, self._group.broadcast(buffer, root), buffer)

    def send(self, buffer: torch.Tensor, to: int, tag: int) -> Pending:
        return _NcclPending(self, self._group.send([buffer], to, tag), buffer)

    def receive(self, buffer: torch.Tensor, source: int, tag: int) -> Pending:
        return _NcclPending(self, self._group.recv([buffer], source, tag), buffer)

    def abort(self) -> None:
        self.aborted = True
        self._group.abort()

    def close(self) -> None:
        self.abort()
