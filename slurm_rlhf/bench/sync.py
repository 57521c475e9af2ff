"""Measure for `slurm-rlhf bench sync`: how fast weights go from the actor to engines, and how fast plain bytes go."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from slurm_rlhf.cluster.gpu_query import local_gpus, share_gpus
from slurm_rlhf.config.model_directory import adapters_of, stored_parameters
from slurm_rlhf.config.schema import Config, Sync
from slurm_rlhf.config.schema_models import Lora
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
    host: str = "127.0.0.1"  # address of the first actor rank
    port_file: str = ""  # where rank 0 writes its port
    timeout_s: float = timeouts.BENCH_SYNC_S
    parent: int = 0  # process with which the ranks end; 0: their own parent, on other machines


def run_bench(options: dict[str, Any], config: Config) -> dict[str, Any]:
    """Measure what the options say. Raises ConfigError, RunError, ModelError."""
    gpus = local_gpus(os.environ) if options["backend"] in ("auto", "nccl", "ipc") else ()
    return measure(_spec(options, bool(gpus)), gpus)


def measure(
    spec: Spec, gpus: tuple[str, ...] = (), prefix: Callable[[str], list[str]] | None = None, scratch: str = ""
) -> dict[str, Any]:
    """Start a process per rank, wait for all, and return what they measured.

    `gpus`: GPUs of each node, as CUDA_VISIBLE_DEVICES names them; empty: CPUs. `prefix`: node -> the words that start a
    rank's command on that node, which sees the directory `scratch`; None: all ranks run on this machine.

    Raises RunError with the last lines of a rank's log. Ends all processes in any case.
    """
    with tempfile.TemporaryDirectory(prefix="bench-sync-", dir=scratch or None) as place:
        spec = replace(spec, port_file=f"{place}/port", parent=0 if prefix else os.getpid())
        (Path(place) / "spec.json").write_text(json.dumps(asdict(spec)))
        processes: list[subprocess.Popen[str]] = []
        nodes = [*spec.actors, *spec.engines]
        devices = share_gpus(nodes, gpus, one_machine=prefix is None)
        try:
            for rank, node in enumerate(nodes):
                command = [sys.executable, "-m", "slurm_rlhf.bench.sync_rank", f"{place}/spec.json", str(rank)]
                own = devices[rank] | ({} if prefix else _LOOPBACK)
                words = [*(prefix(node) if prefix else ()), *command]
                processes.append(_start(words, Path(place) / f"{rank}.log", own))
            measured = _results(processes, Path(place))
        finally:
            for process in processes:
                process.kill()
                process.wait()
    nbytes = sum(2 * math.prod(shape) for _, shape, _ in spec.parameters)
    return {
        "bytes": nbytes,
        "backend": spec.backend,
        "actors": _shape(spec.actors),
        "engines": _shape(spec.engines),
        "zero": spec.zero,
        **measured,
        "bytes_per_s": nbytes / measured["seconds"],  # into each engine rank, and over the network into each node
        "bytes_per_s_all_ranks": nbytes / measured["seconds"] * len(spec.engines),
    }


_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "VLLM_HOST_IP": "127.0.0.1"}


def parameters_of(nbytes: int) -> list[list[Any]]:
    """Return [[name, shape, "bfloat16"], ...] of a transformer with about `nbytes` bytes."""
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


def _spec(options: dict[str, Any], on_gpus: bool) -> Spec:
    if options["model"]:
        parameters: list[list[Any]] = [[name, shape, "bfloat16"] for name, shape in stored_parameters(options["model"])]
    else:
        found = re.fullmatch(r"(\d+)(kB|MB|GB)", options["size"])
        if not found or int(found[1]) == 0:
            units = ", ".join(_UNITS)
            raise ConfigError(f"--size takes a number and a unit, as in 500MB ({units}), got {options['size']!r}")
        parameters = parameters_of(int(found[1]) * _UNITS[found[2]])
    if options["lora_rank"]:
        adapters = adapters_of([(row[0], row[1]) for row in parameters], Lora(rank=options["lora_rank"]))
        parameters = [[name, shape, "bfloat16"] for name, shape in adapters]
    actors, engines = _nodes("actors", options["actors"], "actor"), _nodes("engines", options["engines"], "rollout")
    if "one_node" in options:
        actors, engines = ["node"] * len(actors), ["node"] * len(engines)
    return Spec(
        parameters,
        actors,
        engines,
        zero=options["zero"],
        backend=options["backend"],
        bucket_bytes=Sync(bucket_mb=options["bucket_mb"]).bucket_size_mb(on_gpus) << 20,
        repeats=options["repeats"],
    )


def _start(command: Sequence[str], log: Path, own: dict[str, str]) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **own}
    with log.open("w") as opened:
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=opened, stdin=subprocess.DEVNULL, text=True, env=environment
        )


def _results(processes: Sequence[subprocess.Popen[str]], place: Path) -> dict[str, Any]:
    """Wait for all ranks, and return what rank 0 printed. Raises RunError as soon as a rank fails."""
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


def show(found: dict[str, Any]) -> str:
    """Format the results for a terminal."""
    mega, digits = 1e6, 0 if found["bytes"] >= 1e6 else 3
    lines = [
        f"{found['bytes'] / mega:.{digits}f} MB, actor {found['actors']} -> engines {found['engines']}, "
        f"ZeRO-{found['zero']}, {found['backend']}",
        f"  update        {found['seconds']:.3f} s, {found['bytes_per_s'] / mega:.0f} MB/s into each engine rank and "
        f"node, {found['bytes_per_s_all_ranks'] / mega:.0f} MB/s into all ranks",
        f"  raw           {found['raw_seconds']:.3f} s: the update reaches {found['share_of_raw']:.0%} of that rate "
        f"(median of pairs; least {found['least_share_of_raw']:.0%})",
        f"  CPU           {found['cpu_seconds']:.3f} s of all ranks, {found['cpu_raw_seconds']:.3f} s of the raw way",
        f"  checksums     {found['checksum_seconds']:.3f} s on the slowest engine rank",
        f"  memory        {found['peak_extra_bytes'] / mega:.0f} MB at most on any rank",
    ]
    return "\n".join(lines)


def _nodes(option: str, text: str, role: str) -> list[str]:
    found = re.fullmatch(r"(\d+)x(\d+)", text)
    if not found or "0" in found.groups():
        raise ConfigError(f"--{option} takes nodes x ranks on each, as in 2x4, got {text!r}")
    return [f"{role}{node}" for node in range(int(found[1])) for _ in range(int(found[2]))]


def _shape(nodes: Sequence[str]) -> str:
    return f"{len(set(nodes))}x{len(nodes) // len(set(nodes))}"
