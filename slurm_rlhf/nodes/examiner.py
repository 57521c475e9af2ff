"""Examine a node for the conductor: collect its facts, try to reach others, take part in measurements."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from ipaddress import ip_interface
from pathlib import Path
from typing import Any

import psutil
from msgspec import convert

from slurm_rlhf.cluster.gpu_query import ask_health
from slurm_rlhf.cluster.network import (
    address_towards,
    addresses,
    interface_of,
    is_loopback,
    link_mbits,
    listening,
    unreachable,
)
from slurm_rlhf.errors import ConfigError, PlacementError
from slurm_rlhf.nodes.environment import INTERFACES, visible_gpus, without_injected
from slurm_rlhf.nodes.facts import UNKNOWN, Introduction, NodeFacts, Orders, Place, Reach
from slurm_rlhf.nodes.node_look import equipment, versions
from slurm_rlhf.placement.topology import Topology
from slurm_rlhf.polling import wait_until
from slurm_rlhf.run_directory import refusal
from slurm_rlhf.sandbox.box import chosen
from slurm_rlhf.wire import timeouts
from slurm_rlhf.wire.auth import RunKeys

SHM = Path("/dev/shm")
_INFINIBAND = Path("/sys/class/infiniband")


def collect(orders: Orders, node: str, environ: Mapping[str, str], shm: Path = SHM) -> NodeFacts:
    """Return the facts of this node. Blocks for a second, and for up to 5 more where the canary is not seen."""
    run_dir = Path(orders.run_dir)
    free = _free(run_dir)
    address, interface, subnet = _towards(orders.address)
    sandbox, no_sandbox = _sandbox(orders.sandbox)
    return NodeFacts(
        node=node,
        clock=time.time(),
        versions=versions(),
        equipment=equipment(orders.gpus),
        canary=_read(Path(orders.canary), timeouts.CANARY_S),
        run_dir=_unwritable(run_dir),
        places=tuple(Place(key, path, _unreadable(Path(path))) for key, path in orders.places),
        free_bytes=free[0],
        free_files=free[1],
        shm_free=_free(shm)[0],
        shm=_unwritable(shm),
        memlock=_limit(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]),
        most_files=_limit(resource.getrlimit(resource.RLIMIT_NOFILE)[1]),
        infiniband=_INFINIBAND.is_dir() and any(_INFINIBAND.iterdir()),
        compiler=no_compiler(environ),
        locks=left_locks(environ),
        addresses=tuple(str(each) for _, each in addresses()),
        interface=interface,
        address=address,
        subnet=subnet,
        link_mbits=link_mbits(interface),
        exported=tuple(_exported(environ)),
        sandbox=sandbox,
        no_sandbox=no_sandbox,
        unhealthy=tuple(ask_health(environ)) if orders.gpus else (),
    )


def _sandbox(asked: str) -> tuple[str, str]:
    """Return the kind of sandbox that `reward.sandbox` means here, and why there is none."""
    try:
        return (chosen(asked) if asked else ""), ""
    except ConfigError as error:
        return "", str(error)


def no_compiler(environ: Mapping[str, str]) -> str:
    """Say what Triton would miss, which compiles the launchers of its kernels: a C compiler, or Python's headers."""
    if not environ.get("CC") and not any(shutil.which(name, path=environ.get("PATH")) for name in ("gcc", "clang")):
        return "no C compiler: neither gcc nor clang is on PATH, and CC is not set"
    header = Path(sysconfig.get_path("include"), "Python.h")
    return "" if header.is_file() else f"no headers of Python: {header} is missing"


def left_locks(environ: Mapping[str, str]) -> tuple[str, ...]:
    """List the locks of torch extensions that no process here has open: whoever builds one has it open until the end.

    A builder that was killed leaves its lock, and all who want the extension wait until it is gone.
    """
    chosen, cache = environ.get("TORCH_EXTENSIONS_DIR"), environ.get("XDG_CACHE_HOME")
    usual = Path(cache or f"{environ.get('HOME', '')}/.cache", "torch_extensions")
    locks = {str(lock.resolve()) for lock in (Path(chosen).glob("*/lock") if chosen else usual.glob("*/*/lock"))}
    for link in Path("/proc").glob("[0-9]*/fd/*") if locks else ():
        with contextlib.suppress(OSError):
            locks.discard(os.readlink(link))
    return tuple(sorted(locks))


def _towards(conductor: str) -> tuple[str, str, str]:
    """Return (address, interface, subnet) of this node on the way to the conductor; empty where there is no way."""
    try:
        address = address_towards(conductor)
    except PlacementError:
        return "", "", ""
    interface = interface_of(address)
    known = psutil.net_if_addrs().get(interface, [])
    mask = next((each.netmask for each in known if each.address == address and each.family == socket.AF_INET), None)
    return address, interface, str(ip_interface(f"{address}/{mask}").network) if mask else ""


def _exported(environ: Mapping[str, str]) -> list[str]:
    """Say which exported names of interfaces do not exist here. `^` and `=` are NCCL's; gloo takes names alone."""
    there = {name for name, _ in addresses()}
    problems = []
    for variable in INTERFACES:
        value = environ.get(variable, "")
        names = [name.partition(":")[0] for name in value.lstrip("=").split(",") if name]
        if not names or value.startswith("^"):
            continue
        exact = value.startswith("=") or variable.startswith("GLOO")
        if not any(mine == name or (not exact and mine.startswith(name)) for name in names for mine in there):
            problems.append(f"{variable}={value}, and its interfaces are {', '.join(sorted(there))}")
    return problems


def _free(place: Path) -> tuple[int, int]:
    """Return the free bytes and files (UNKNOWN where the file system does not count them) for this user."""
    try:
        found = os.statvfs(place)
    except OSError:
        return UNKNOWN, UNKNOWN
    return found.f_bavail * found.f_frsize, found.f_favail if found.f_files else UNKNOWN


def _unwritable(directory: Path) -> str:
    """Say why a megabyte cannot be written there."""
    file = directory / f".preflight.{socket.gethostname()}.{os.getpid()}"
    try:
        file.write_bytes(bytes(1 << 20))
    except OSError as error:
        return refusal(error, directory) or error.strerror or str(error)
    finally:
        with contextlib.suppress(OSError):
            file.unlink()
    return ""


def _unreadable(path: Path) -> str:
    """Say why `path` cannot be read; of a directory the files directly in it count."""
    try:
        files = [each for each in path.iterdir() if each.is_file()] if path.is_dir() else [path]
        for file in files:
            with file.open("rb") as opened:
                opened.read(1)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _limit(value: int) -> int:
    return UNKNOWN if value == resource.RLIM_INFINITY else value


def _read(file: Path, wait_s: float) -> str:
    with contextlib.suppress(OSError):
        wait_until(file.exists, wait_s, 0.2, 0.2)
        return file.read_text(encoding="utf-8")
    return ""


_PROBES = 16  # connections that are tried at a time


class Examiner:
    """Looks at the node of an agent, and takes part in measurements.

    The thread that calls `introduce` must live as long as the agent: a process that imports torch ends with it. Other
    threads may call the rest.
    """

    def __init__(self, orders: Orders, node: str) -> None:
        self._orders = orders
        self._node = node
        self._secret = RunKeys.parse(orders.keys, "the agent's orders").client_secret
        self._listening: socket.socket | None = None  # for the store of a group, and for others to reach
        self._host: GroupHost | None = None

    def introduce(self) -> Introduction:
        """Get ready for measurements. Raises OSError and PlacementError."""
        own = address_towards(self._orders.address)
        self._listening = listening(own)
        self._host = GroupHost(self._listening) if self._orders.groups else None
        return Introduction(own, self._listening.getsockname()[1], time.time())

    def facts(self, peers: Mapping[str, int]) -> NodeFacts:
        """Say what is known of this node, and whether it reaches others; `peers`: node -> port of its agent."""
        return replace(collect(self._orders, self._node, os.environ), reached=reach(peers, timeouts.CONNECT_S))

    def groups(self, order: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Start the processes of `order`; return the reports of all of them."""
        assert self._host is not None, "the orders said nothing of groups"
        return list(self._host.run({**order, "secret": self._secret}, os.environ))

    def close(self) -> None:
        """End what it has started; the node is examined."""
        if self._listening is not None:
            self._listening.close()
        if self._host is not None:
            self._host.end()
        self._listening = self._host = None


def reach(peers: Mapping[str, int], timeout_s: float) -> tuple[Reach, ...]:
    """Connect to other nodes by their names; `peers`: node -> port at which its agent listens."""
    if not peers:
        return ()
    with ThreadPoolExecutor(min(_PROBES, len(peers))) as threads:
        return tuple(threads.map(lambda node: _reach(node, peers[node], timeout_s), peers))


def _reach(node: str, port: int, timeout_s: float) -> Reach:
    try:
        found = socket.getaddrinfo(node, port, type=socket.SOCK_STREAM)
    except OSError as error:
        return Reach(node, "", error.strerror or str(error))
    address = str(min(found, key=lambda each: each[0] != socket.AF_INET)[4][0])
    # A refusal is an answer: the node is there, and its agent listens on another of its addresses.
    return Reach(node, address, unreachable(address, port, timeout_s, listens=False))


class GroupHost:
    """Start `group_rank` on this node; importing torch takes seconds, in which other checks go on.

    `listening`: where the store of a group listens if this node has it.
    """

    def __init__(self, listening: socket.socket) -> None:
        reading, writing = os.pipe()  # not its output: libraries print into that
        self._address = str(listening.getsockname()[0])
        self._reports = os.fdopen(reading, encoding="utf-8")
        # NCCL's own choice may be a link that no other node has; a run names the one to the others, too.
        network = {"NCCL_SOCKET_IFNAME": interface_of(self._address)}
        fds = (listening.fileno(), writing)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "slurm_rlhf.nodes.group_rank", *map(str, fds), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=fds,
            env={**network, **without_injected(os.environ), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
            text=True,
        )
        os.close(writing)

    def run(self, order: Mapping[str, Any], environ: Mapping[str, str]) -> Iterator[dict[str, Any]]:
        """Let the processes of `order` go through their stages; yield their reports until all have ended."""
        interface = environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
        named = [] if is_loopback(self._address) else [str(own) for name, own in addresses() if name == interface]
        address = [*named, self._address][0]
        place = convert(order["place"], Topology)
        node = place.nodes[0].name
        processes = [
            [process, slot, visible_gpus(place, node, [slot], environ)] for process, slot in order["processes"]
        ]
        assert self._process.stdin is not None
        assert self._process.stderr is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended
            self._process.stdin.write(json.dumps({**order, "processes": processes, "address": address}) + "\n")
            self._process.stdin.flush()
        for line in self._reports:
            if (report := json.loads(line)) == {"end": True}:
                return
            yield report
        said = self._process.stderr.read().strip().splitlines() or ["without a word"]
        error = f"the process that imports torch has ended: {said[-1]}"
        mine = {process for process, _ in order["processes"]}
        for name, members in (group for stage in order["stages"] for group in stage):
            yield from ({"process": process, "group": name, "error": error} for process in mine.intersection(members))

    def end(self) -> None:
        """End the process and what it started."""
        with self._process, self._reports:
            self._process.kill()  # its children end with it
