"""`python -m slurm_rlhf.bench.sync_rank SPEC.json RANK`: one rank of `slurm-rlhf bench sync`.

All ranks move the same synthetic weights on three ways, from a barrier to the last rank's word: as updates of the real
run, as plain gloo does it with the same bytes, and naively, each parameter broadcast by itself.

The raw way has the same engine ranks and one actor rank, the same kind of sockets, and nothing of the rest: the bytes
of one buffer, over and over, into one buffer, without checksums.
"""

from __future__ import annotations

import ctypes
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
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
from slurm_rlhf.weights.rendezvous import Membership, SyncStore
from slurm_rlhf.weights.transfer_plan import Layout, Parameter, SyncPlan, make_plan

RAW_PIECE = 64 << 20
ON_GPUS = ("nccl", "ipc")
"""Backends whose ranks have GPUs, where there are any."""


class Resident:
    """Read how much memory of this process is resident, in bytes, as the kernel counts it; 0 where it does not."""

    def __init__(self, reset: bool = False) -> None:
        """`reset`: the highest value begins anew."""
        ctypes.CDLL(None).malloc_trim(0)  # memory that is free already is nobody's
        if reset:
            with suppress(OSError):
                Path("/proc/self/clear_refs").write_text("5")
        self.now = self._read("VmRSS")

    def peak(self) -> int:
        """Return the highest value since then."""
        return self._read("VmHWM")

    def _read(self, name: str) -> int:
        with suppress(OSError):
            for line in Path("/proc/self/status").read_text().splitlines():
                if line.startswith(name):
                    return int(line.split()[1]) << 10
        return 0


class Rank:
    """Run one process of the benchmark."""

    def __init__(self, spec: Spec, rank: int) -> None:
        self.spec = spec
        self.rank = rank
        self.is_actor = rank < len(spec.actors)
        self.engine = _engine(spec) if spec.model and not self.is_actor else None
        port = self._port()
        member = Membership(
            name="bench",
            rank=rank,
            world=len(spec.actors) + len(spec.engines),
            actors=len(spec.actors),
            host=spec.host,
            port=port,
            timeout_s=spec.timeout_s,
            backend=spec.backend,
            label=f"actor {rank}" if self.is_actor else f"rollout {rank - len(spec.actors)}",
            node=[*spec.actors, *spec.engines][rank],
        )
        self.group: SyncGroup = join(member)
        self.plan: SyncPlan = make_plan(spec.parameters, spec.bucket_bytes, self.group.layout(spec.zero))
        self.device = torch.device("cuda" if self.group.me.device and self.group.backend in ON_GPUS else "cpu")
        self.held: Held = _held(self.plan, rank, self.device) if self.is_actor else {}
        self.without = Resident()
        self.sender = Sender(self.group, self.plan) if self.is_actor else None
        self.receiver = None if self.is_actor else Receiver(self.group, self.plan)
        self.plain = self._gloo("plain", range(self.group.world))
        self.raw = self._raw_group()

    def run(self) -> dict[str, Any]:
        """Measure the seconds of each way, median of the repetitions."""
        # The first update touches fresh memory; the bytes are compared in it, outside of what is measured.
        self._timed(lambda: self._update(0, compare=True))
        versions = iter(range(1, 1000))
        resident = self._resident(lambda: self._update(next(versions)))
        # In turn, so that whatever else the machine does falls on both.
        ways: dict[str, Callable[[], None]] = {
            "seconds": lambda: self._update(next(versions)),
            "raw_seconds": self._raw,
        }
        results: dict[str, Any] = self._in_turn(ways)
        results["peak_extra_bytes"] = self._peaks()
        results["resident_extra_bytes"] = resident
        results["checksum_seconds"] = max(self._of_all(self.receiver.verify_s if self.receiver else 0.0))
        if self.spec.model:
            results |= self._in_turn({"seconds_with_loading": lambda: self._load(next(versions))})
        if self.spec.naive:
            results["naive_seconds"], _ = self._timed(self._naive)
        self.plain.barrier().wait()
        return results

    def _in_turn(self, ways: dict[str, Callable[[], None]]) -> dict[str, Any]:
        """Return the medians, and where the raw way is among them, which part of its rate the updates reach."""
        found: dict[str, list[float]] = {}
        for _ in range(self.spec.repeats):
            for name, work in ways.items():
                for measured, value in zip((name, f"cpu_{name}"), self._timed(work), strict=True):
                    found.setdefault(measured, []).append(value)
        results: dict[str, Any] = {name: statistics.median(values) for name, values in found.items()}
        if "raw_seconds" in found:
            shares = [raw / ours for ours, raw in zip(found["seconds"], found["raw_seconds"], strict=True)]
            results |= {"share_of_raw": statistics.median(shares), "least_share_of_raw": min(shares)}
        return results

    def _timed(self, work: Callable[[], None]) -> tuple[float, float]:
        """Return the seconds from the first to the last rank, and of CPUs, all ranks together."""
        self.plain.barrier().wait()
        start, busy = time.monotonic(), time.process_time()
        work()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.plain.barrier().wait()
        seconds = time.monotonic() - start
        return seconds, sum(self._of_all(time.process_time() - busy))

    def _update(self, version: int, compare: bool = False) -> None:
        if self.sender is not None:
            self.sender.push(self.held, version)
            return
        assert self.receiver is not None
        with self.receiver.update(version) as weights:
            for index, (name, tensor) in enumerate(weights):
                if compare and not torch.equal(tensor.cpu(), _values(self.plan.parameters[index], index)):
                    raise RuntimeError(f"{name} did not arrive as it was sent")

    def _load(self, version: int) -> None:
        if self.engine is None:
            self._update(version)
            return
        assert self.receiver is not None
        with self.receiver.update(version) as weights:
            self.engine.load(weights, version)

    def _raw(self) -> None:
        """Move the bytes: over a network once over one link, by one stream; on loopback broadcast to all engines."""
        if self.raw is None:
            return
        layout = Layout(tuple(self.spec.actors), tuple(self.spec.engines))
        network = not is_loopback(self.group.me.address)
        at = self.device if self.group.backend == "nccl" else torch.device("cpu")
        whole = torch.zeros(min(RAW_PIECE, self.plan.payload), dtype=torch.uint8, device=at)
        pieces = [whole[: min(RAW_PIECE, left)] for left in _left(self.plan.payload)]
        world = range(layout.world) if network else ()
        remote = [rank for rank in world if layout.node(rank) != layout.node(0)]
        if not remote:
            for piece in pieces:
                self.raw.broadcast(piece, 0).wait()
        for tag, piece in enumerate(pieces if remote else []):
            if self.rank == 0:
                self.raw.send([piece], self._of_raw.index(remote[-1]), tag).wait()
            elif self.rank == remote[-1]:
                self.raw.recv([piece], 0, tag).wait()

    def _naive(self) -> None:
        """Broadcast one parameter at a time from one root, to every engine rank for itself."""
        whole = torch.zeros(max(parameter.nbytes for parameter in self.plan.parameters), dtype=torch.uint8)
        for parameter in self.plan.parameters:
            if parameter.nbytes:
                self.plain.broadcast(whole[: parameter.nbytes], 0).wait()

    def _peaks(self) -> int:
        end = self.sender or self.receiver
        return round(max(self._of_all(float(end.peak if end else 0))))

    def _resident(self, work: Callable[[], None]) -> int:
        """Return what the transfer takes of the process's memory while it does `work`, on the rank with the most."""
        before = Resident(reset=True)
        self._timed(work)
        return round(max(self._of_all(float(max(before.peak() - self.without.now, 0)))))

    def _of_all(self, value: float) -> list[float]:
        """Return the values of all ranks."""
        found = [torch.zeros(1, dtype=torch.float64) for _ in range(self.group.world)]
        self.plain.allgather([found], [torch.tensor([value], dtype=torch.float64)]).wait()
        return [float(each) for each in found]

    def _gloo(self, name: str, ranks: Sequence[int]) -> Any:
        store = PrefixStore(name, self.group.store)
        return gloo_group(store, ranks.index(self.rank), len(ranks), self.group.me.address, self.spec.timeout_s)

    @property
    def _of_raw(self) -> list[int]:
        """Return the ranks of the raw transfer: rank 0, which sends, and the engine ranks, which receive."""
        return [0, *range(len(self.spec.actors), self.group.world)]

    def _raw_group(self) -> Any:
        if self.rank not in self._of_raw:
            return None
        if self.group.backend != "nccl":
            return self._gloo("raw", self._of_raw)
        made = nccl_group(
            PrefixStore("raw", self.group.store),
            self._of_raw.index(self.rank),
            len(self._of_raw),
            self.spec.timeout_s,
        )
        made.allreduce(torch.zeros(1, device="cuda")).wait()  # connects all, before anything is timed
        torch.cuda.synchronize()
        return made

    def _port(self) -> int:
        file = Path(self.spec.port_file)
        if self.rank == 0:
            self.store = SyncStore.listen(self.spec.host, self.spec.timeout_s)
            write_atomically(file, str(self.store.port))
        wait_until(file.exists, self.spec.timeout_s)
        return int(file.read_text())


def _held(plan: SyncPlan, rank: int, device: torch.device) -> Held:
    """Make what an actor rank has: under ZeRO-3 its shard, else everything."""
    held = {}
    for index, parameter in enumerate(plan.parameters):
        step = -(-parameter.numel // len(plan.layout.actors)) if plan.layout.zero_stage == 3 else parameter.numel
        first = rank * step if plan.layout.zero_stage == 3 else 0
        low = min(first, parameter.numel)
        held[parameter.name] = (low, _values(parameter, index).reshape(-1)[low : low + step].clone().to(device))
    return held


def _values(parameter: Parameter, index: int) -> torch.Tensor:
    """Make numbers that differ between neighbours and between parameters, the same on every rank."""
    flat = (torch.arange(parameter.numel, dtype=torch.int32) * 7919 + index * 104729) % 65521
    return (flat - 32760).to(getattr(torch, parameter.dtype)).view(parameter.shape)


def _left(nbytes: int) -> Iterator[int]:
    while nbytes > 0:
        yield nbytes
        nbytes -= RAW_PIECE


def _engine(spec: Spec) -> Any:
    from slurm_rlhf.config.schema import Config
    from slurm_rlhf.engine.engine import backend

    config = Config()
    backend(config).prepare_environment()
    config.actor.model_name_or_path = spec.model
    config.vllm.cpu_kvcache_gib = 0.1
    config.data.max_len, config.vllm.max_num_seqs = 64, 2
    return backend(config).make_engine(config, 0)


def main() -> None:
    spec, rank = Spec(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))), int(sys.argv[2])
    die_with_parent(spec.parent or os.getppid())
    torch.set_num_threads(1)
    results = Rank(spec, rank).run()
    if rank == 0:
        print(json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
