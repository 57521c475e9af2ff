"""Collect what a node can say of itself without the help of others. Imports no torch: takes a second."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import socket
import sysconfig
import time
from collections.abc import Mapping
from ipaddress import ip_interface
from pathlib import Path

import psutil

from slurm_rlhf.cluster.gpu_query import ask_health
from slurm_rlhf.cluster.network import address_towards, addresses, interface_of, link_mbits
from slurm_rlhf.errors import ConfigError, PlacementError
from slurm_rlhf.nodes.environment import INTERFACES
from slurm_rlhf.nodes.facts import UNKNOWN, NodeFacts, Orders, Place
from slurm_rlhf.nodes.node_look import equipment, versions
from slurm_rlhf.polling import wait_until
from slurm_rlhf.run_directory import refusal
from slurm_rlhf.sandbox.box import chosen
from slurm_rlhf.wire import timeouts

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
    """List the locks of torch extensions that no process here has open, as whoever builds one has it until the end.

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
    return address, interface, _subnet(interface, address)


def _subnet(interface: str, address: str) -> str:
    known = psutil.net_if_addrs().get(interface, [])
    mask = next((each.netmask for each in known if each.address == address and each.family == socket.AF_INET), None)
    return str(ip_interface(f"{address}/{mask}").network) if mask else ""


def _exported(environ: Mapping[str, str]) -> list[str]:
    """Say which exported names of interfaces do not exist here. `^` and `=` are NCCL's; gloo takes names alone."""
    there = {name for name, _ in addresses()}
    told = []
    for variable in INTERFACES:
        value = environ.get(variable, "")
        names = [name.partition(":")[0] for name in value.lstrip("=").split(",") if name]
        if not names or value.startswith("^"):
            continue
        exact = value.startswith("=") or variable.startswith("GLOO")
        if not any(mine == name or (not exact and mine.startswith(name)) for name in names for mine in there):
            told.append(f"{variable}={value}, and its interfaces are {', '.join(sorted(there))}")
    return told


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
