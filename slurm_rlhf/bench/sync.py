"""`slurm-rlhf bench sync`: how fast weights go from actor to engines, and how fast the bytes alone."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from slurm_rlhf.bench.options import Given
from slurm_rlhf.cluster.gpu_query import local_gpus, share_gpus
from slurm_rlhf.config.model_directory import stored_parameters
from slurm_rlhf.config.schema import Sync
from slurm_rlhf.errors import ConfigError, RunError
from slurm_rlhf.wire import timeouts

_UNITS = {"kB": 10**3, "MB": 10**6, "GB": 10**9}


@dataclass(slots=True)
class Spec:
    """Tell every rank what is measured."""

    parameters: list[list[Any]]
    actors: list[str]  # node of each rank
    engines: list[str]
    zero: int = 0
    backend: str = "gloo"
    bucket_bytes: int = 64 << 20
    repeats: int = 3
    naive: bool = True
    model: str = ""  # directory to load into; empty: no loading
    host: str = "127.0.0.1"  # address of the first actor rank
    port_file: str = ""  # where rank 0 writes its port
    timeout_s: float = timeouts.BENCH_SYNC_S
    parent: int = 0  # the process that ranks end with; 0: whichever has started this one, on another machine


@dataclass(slots=True)
class SyncWorld(Spec):
    """Describe what is measured, and how ranks are started."""

    prefix: Callable[[str], list[str]] = field(default=lambda node: [])  # node -> words before a rank's command
    gpus: tuple[str, ...] = ()  # GPUs of each node, as CUDA_VISIBLE_DEVICES names them; empty: CPUs
    remote: bool = False  # `prefix` starts ranks on other machines, which see `scratch`
    scratch: str = ""  # directory for what the ranks are told; empty: the system's


def run_bench(given: Given) -> dict[str, Any]:
    """Measure what the options ask for. Raises ConfigError, RunError, ModelError."""
    return measure(_world(given.options))


def measure(world: SyncWorld) -> dict[str, Any]:
    """Start a process per rank, wait for all, and return what they measured.

    Raises RunError with the last lines of a rank. Whatever happens, none of the processes is left.
    """
    with tempfile.TemporaryDirectory(prefix="bench-sync-", dir=world.scratch or None) as place:
        spec = {each.name: getattr(world, each.name) for each in fields(Spec)}
        spec |= {"port_file": f"{place}/port", "parent": 0 if world.remote else os.getpid()}
        (Path(place) / "spec.json").write_text(json.dumps(spec))
        processes: list[subprocess.Popen[str]] = []
        nodes = [*world.actors, *world.engines]
        gpus = share_gpus(nodes, world.gpus, one_machine=not world.remote)
        try:
            for rank, node in enumerate(nodes):
                command = [sys.executable, "-m", "slurm_rlhf.bench.sync_rank", f"{place}/spec.json", str(rank)]
                own = gpus[rank] | ({} if world.remote else _LOOPBACK)
                processes.append(_start([*world.prefix(node), *command], Path(place) / f"{rank}.log", own))
            measured = _results(processes, Path(place))
        finally:
            for process in processes:
                process.kill()
                process.wait()
    return _derived(world, measured)


_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "VLLM_HOST_IP": "127.0.0.1"}


def parameters_of(nbytes: int) -> list[list[Any]]:
    """Return [[name, shape, "bfloat16"], ...] of a made-up transformer of about `nbytes` bytes, at least one layer."""
    hidden = 128
    while 24 * (2 * hidden) ** 2 * 16 < nbytes:
        hidden *= 2
    vocabulary, wide, narrow = 32 * hidden // 4, 11 * hidden // 4, hidden // 4
    layer = {"q": [hidden, hidden], "k": [narrow, hidden], "v": [narrow, hidden], "o": [hidden, hidden]}
    layer |= {"gate": [wide, hidden], "up": [wide, hidden], "down": [hidden, wide], "norm": [hidden], "bias": [hidden]}
    found: list[list[Any]] = [["embed.weight", [vocabulary, hidden], "bfloat16"]]
    total = 2 * vocabulary * hidden
    while total < nbytes:
        number = (len(found) - 1) // len(layer)
        found += [[f"layers.{number}.{name}.weight", shape, "bfloat16"] for name, shape in layer.items()]
        total += sum(2 * math.prod(shape) for shape in layer.values())
    return found


def _world(options: dict[str, Any]) -> SyncWorld:
    if options["load"] and not options["model"]:
        raise ConfigError("--load needs the model that vLLM is to be started on: --model=DIRECTORY")
    if options["model"]:
        parameters = [[name, shape, "bfloat16"] for name, shape in stored_parameters(options["model"])]
    else:
        parameters = parameters_of(_bytes(options["size"]))
    actors, engines = _nodes("actors", options["actors"], "actor"), _nodes("engines", options["engines"], "rollout")
    if options["one_node"]:
        actors, engines = ["node"] * len(actors), ["node"] * len(engines)
    gpus = local_gpus(os.environ) if options["backend"] in ("auto", "nccl", "ipc") else ()
    return SyncWorld(
        parameters,
        actors,
        engines,
        zero=options["zero"],
        backend=options["backend"],
        bucket_bytes=Sync(bucket_mb=options["bucket_mb"]).bucket_size_mb(bool(gpus)) << 20,
        repeats=options["repeats"],
        naive=options["naive"],
        model=options["model"] if options["load"] else "",
        gpus=gpus,
    )


def _start(command: Sequence[str], log: Path, own: dict[str, str]) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **own}
    with log.open("w") as opened:
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=opened, stdin=subprocess.DEVNULL, text=True, env=environment
        )


def _results(processes: Sequence[subprocess.Popen[str]], place: Path) -> dict[str, Any]:
    """Wait for all ranks and return what rank 0 printed. Raises RunError as soon as a rank has failed."""
    waiting = dict(enumerate(processes))
    while waiting:
        for rank, process in list(waiting.items()):
            try:
                code = process.wait(0.05)
            except subprocess.TimeoutExpired:
                continue
            del waiting[rank]
            if code:
                words = (place / f"{rank}.log").read_text().strip().splitlines()[-6:]
                raise RunError(f"bench sync: rank {rank} ended with {code}:\n" + "\n".join(words))
    output, _ = processes[0].communicate()
    return dict(json.loads(output.splitlines()[-1]))


def _derived(world: SyncWorld, measured: dict[str, Any]) -> dict[str, Any]:
    nbytes = sum(2 * math.prod(shape) for _, shape, _ in world.parameters)
    rate = nbytes / measured["seconds"]
    nodes = len(set(world.engines))
    return {
        "bytes": nbytes,
        "backend": world.backend,
        "actors": _shape(world.actors),
        "engines": _shape(world.engines),
        "zero": world.zero,
        **measured,
        "bytes_per_s": rate,  # arriving at each engine rank, and over the network at each engine node
        "bytes_per_s_all_ranks": rate * len(world.engines),
        "bytes_per_s_all_nodes": rate * nodes,
        "naive_seconds": measured.get("naive_seconds"),
    }


def show(found: dict[str, Any]) -> str:
    """Write the results for a reader."""
    mega = 1e6
    lines = [
        f"{found['bytes'] / mega:.0f} MB, actor {found['actors']} -> engines {found['engines']}, ZeRO-{found['zero']}, "
        f"{found['backend']}",
        f"  update        {found['seconds']:.3f} s, {found['bytes_per_s'] / mega:.0f} MB/s into each engine rank and "
        f"node, {found['bytes_per_s_all_ranks'] / mega:.0f} MB/s into all ranks",
        f"  raw           {found['raw_seconds']:.3f} s: the update reaches {found['share_of_raw']:.0%} of that rate "
        f"(median of pairs; least {found['least_share_of_raw']:.0%})",
        f"  CPU           {found['cpu_seconds']:.3f} s of all ranks, {found['cpu_raw_seconds']:.3f} s of the raw way",
    ]
    if found["naive_seconds"] is not None:
        lines.append(f"  naive         {found['naive_seconds']:.3f} s")
    if "seconds_with_loading" in found:
        lines.append(f"  with loading  {found['seconds_with_loading']:.3f} s")
    lines.append(f"  checksums     {found['checksum_seconds']:.3f} s of the slowest engine rank")
    held = f"{found['resident_extra_bytes'] / mega:.0f} MB of a process are resident"
    lines.append(f"  memory        {found['peak_extra_bytes'] / mega:.0f} MB at most on any rank; {held}")
    return "\n".join(lines)


def _nodes(option: str, text: str, role: str) -> list[str]:
    found = re.fullmatch(r"(\d+)x(\d+)", text)
    if not found or "0" in found.groups():
        raise ConfigError(f"--{option} takes nodes x ranks on each, as in 2x4, got {text!r}")
    return [f"{role}{node}" for node in range(int(found[1])) for _ in range(int(found[2]))]


def _bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+)(kB|MB|GB)", text)
    if not found or int(found[1]) == 0:
        raise ConfigError(f"--size takes a number and a unit, as in 500MB ({', '.join(_UNITS)}), got {text!r}")
    return int(found[1]) * _UNITS[found[2]]


def _shape(nodes: Sequence[str]) -> str:
    return f"{len(set(nodes))}x{len(nodes) // len(set(nodes))}"
