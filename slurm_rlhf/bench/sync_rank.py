"""Run one rank of `slurm-rlhf bench sync`: `python -m slurm_rlhf.bench.sync_rank SPEC.json RANK`.

All ranks move the same synthetic weights in two ways: as a run does, and raw. Each is timed from a barrier until the
last rank has finished.

The raw way sends the same number of bytes from one actor rank to the engine ranks over the same kind of sockets, always
from one buffer into one buffer, without checksums.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed import PrefixStore

from slurm_rlhf.bench.sync import Spec
from slurm_rlhf.cluster.network import is_loopback
from slurm_rlhf.cluster.processes import die_with_parent
from slurm_rlhf.polling import wait_until
from slurm_rlhf.process_groups._torch import gloo_group, nccl_group
from slurm_rlhf.run_directory import write_atomically
from slurm_rlhf.weights.ends import Held, Receiver, Sender
from slurm_rlhf.weights.group import SyncGroup, join
from slurm_rlhf.weights.rendezvous import Membership, listen
from slurm_rlhf.weights.transfer_plan import Parameter, SyncPlan, TransferLayout, make_plan

RAW_PIECE = 64 << 20
ON_GPUS = ("nccl", "ipc")
"""Backends whose ranks use GPUs if there are any."""


class Rank:
    """Run one process of the benchmark."""

    def __init__(self, spec: Spec, rank: int) -> None:
        self.spec = spec
        self.rank = rank
        self.is_actor = rank < len(spec.actors)
        file = Path(spec.port_file)
        if rank == 0:
            self.store = listen(spec.host, spec.timeout_s)
            write_atomically(file, str(self.store.port))
        wait_until(file.exists, spec.timeout_s)
        member = Membership(
            name="bench",
            rank=rank,
            world=len(spec.actors) + len(spec.engines),
            actors=len(spec.actors),
            host=spec.host,
            port=int(file.read_text()),
            timeout_s=spec.timeout_s,
            backend=spec.backend,
            label=f"actor {rank}" if self.is_actor else f"rollout {rank - len(spec.actors)}",
            node=[*spec.actors, *spec.engines][rank],
        )
        self.group: SyncGroup = join(member)
        self.plan: SyncPlan = make_plan(spec.parameters, spec.bucket_bytes, self.group.layout(spec.zero))
        self.device = torch.device("cuda" if self.group.me.device and self.group.backend in ON_GPUS else "cpu")
        self.held: Held = _held(self.plan, rank, self.device) if self.is_actor else {}
        self.sender = Sender(self.group, self.plan) if self.is_actor else None
        self.receiver = None if self.is_actor else Receiver(self.group, self.plan)
        self.plain = self._gloo("plain", range(self.group.world))
        self.raw = self._raw_group()

    def run(self) -> dict[str, Any]:
        """Measure all ways; return the median seconds of each, and more figures."""
        # The first update compares the bytes, and touches fresh memory: it does not count.
        self._timed(lambda: self._update(0, compare=True))
        versions = iter(range(1, 1000))
        # In turns, so that other load on the machine slows both.
        ways = {"seconds": lambda: self._update(next(versions)), "raw_seconds": self._raw}
        found: dict[str, list[float]] = {}
        for _ in range(self.spec.repeats):
            for name, work in ways.items():
                for measured, value in zip((name, f"cpu_{name}"), self._timed(work), strict=True):
                    found.setdefault(measured, []).append(value)
        results: dict[str, Any] = {name: statistics.median(values) for name, values in found.items()}
        shares = [raw / ours for ours, raw in zip(found["seconds"], found["raw_seconds"], strict=True)]
        results |= {"share_of_raw": statistics.median(shares), "least_share_of_raw": min(shares)}
        end = self.sender or self.receiver
        results["peak_extra_bytes"] = round(max(self._gathered(float(end.peak if end else 0))))
        results["checksum_seconds"] = max(self._gathered(self.receiver.verify_s if self.receiver else 0.0))
        self.plain.barrier().wait()
        return results

    def _timed(self, work: Callable[[], None]) -> tuple[float, float]:
        """Return the seconds until the last rank has finished, and the CPU seconds of all ranks."""
        self.plain.barrier().wait()
        start, busy = time.monotonic(), time.process_time()
        work()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.plain.barrier().wait()
        seconds = time.monotonic() - start
        return seconds, sum(self._gathered(time.process_time() - busy))

    def _update(self, version: int, compare: bool = False) -> None:
        if self.sender is not None:
            self.sender.push(self.held, version)
            return
        assert self.receiver is not None
        with self.receiver.update(version) as weights:
            for index, (name, tensor) in enumerate(weights):
                if compare and not torch.equal(tensor.cpu(), _values(self.plan.parameters[index], index)):
                    raise RuntimeError(f"{name} did not arrive as it was sent")

    def _raw(self) -> None:
        """Move the bytes: on loopback by a broadcast to all engines, over a network to one remote engine."""
        if self.raw is None:
            return
        layout = TransferLayout(tuple(self.spec.actors), tuple(self.spec.engines))
        network = not is_loopback(self.group.me.address)
        at = self.device if self.group.backend == "nccl" else torch.device("cpu")
        whole = torch.zeros(min(RAW_PIECE, self.plan.payload), dtype=torch.uint8, device=at)
        pieces = [whole[: min(RAW_PIECE, self.plan.payload - sent)] for sent in range(0, self.plan.payload, RAW_PIECE)]
        world = range(layout.world) if network else ()
        remote = [rank for rank in world if layout.node(rank) != layout.node(0)]
        if not remote:
            for piece in pieces:
                self.raw.broadcast(piece, 0).wait()
        for tag, piece in enumerate(pieces if remote else []):
            if self.rank == 0:
                self.raw.send([piece], self._raw_ranks.index(remote[-1]), tag).wait()
            elif self.rank == remote[-1]:
                self.raw.recv([piece], 0, tag).wait()

    def _gathered(self, value: float) -> list[float]:
        """Return the values that all ranks pass to this call."""
        found = [torch.zeros(1, dtype=torch.float64) for _ in range(self.group.world)]
        self.plain.allgather([found], [torch.tensor([value], dtype=torch.float64)]).wait()
        return [float(each) for each in found]

    def _gloo(self, name: str, ranks: Sequence[int]) -> Any:
        store = PrefixStore(name, self.group.store)
        return gloo_group(store, ranks.index(self.rank), len(ranks), self.group.me.address, self.spec.timeout_s)

    @property
    def _raw_ranks(self) -> list[int]:
        """List the ranks of the raw transfer: rank 0, which sends, and the engine ranks, which receive."""
        return [0, *range(len(self.spec.actors), self.group.world)]

    def _raw_group(self) -> Any:
        if self.rank not in self._raw_ranks:
            return None
        if self.group.backend != "nccl":
            return self._gloo("raw", self._raw_ranks)
        made = nccl_group(
            PrefixStore("raw", self.group.store),
            self._raw_ranks.index(self.rank),
            len(self._raw_ranks),
            self.spec.timeout_s,
        )
        made.allreduce(torch.zeros(1, device="cuda")).wait()  # connects all ranks before anything is timed
        torch.cuda.synchronize()
        return made


def _held(plan: SyncPlan, rank: int, device: torch.device) -> Held:
    """Make the parameters that an actor rank holds: under ZeRO-3 its shards, else all of them."""
    held = {}
    for index, parameter in enumerate(plan.parameters):
        step = -(-parameter.numel // len(plan.layout.actors)) if plan.layout.zero_stage == 3 else parameter.numel
        first = rank * step if plan.layout.zero_stage == 3 else 0
        low = min(first, parameter.numel)
        held[parameter.name] = (low, _values(parameter, index).reshape(-1)[low : low + step].clone().to(device))
    return held


def _values(parameter: Parameter, index: int) -> torch.Tensor:
    """Make numbers that differ between neighbours and between parameters, and are the same on every rank."""
    flat = (torch.arange(parameter.numel, dtype=torch.int32) * 7919 + index * 104729) % 65521
    return (flat - 32760).to(getattr(torch, parameter.dtype)).view(parameter.shape)


def main() -> None:
    spec, rank = Spec(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))), int(sys.argv[2])
    die_with_parent(spec.parent or os.getppid())
    torch.set_num_threads(1)
    results = Rank(spec, rank).run()
    if rank == 0:
        print(json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
