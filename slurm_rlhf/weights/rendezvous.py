"""The meeting of a group's members: they find each other, describe themselves and agree on a backend.

The store is a TCPStore of the group's own, on a port that the system chooses. There the members say who they are, and
whether they reach each other; rank 0 chooses the backend.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Store, TCPStore

from slurm_rlhf.cluster.network import is_loopback, listening, own_address, unreachable
from slurm_rlhf.errors import ConfigError, SyncError
from slurm_rlhf.polling import wait_until
from slurm_rlhf.process_groups._torch import connect_store, signed

_PROBES = 16  # connections that are tried at a time


def listen(host: str, timeout_s: float) -> TCPStore:
    """Open a group's store, in the process of its rank 0, on the address that `host` has here and on no other.

    If the name resolves to loopback here, as a node's own name does on Debian (127.0.1.1), on the address of the
    interface GLOO_SOCKET_IFNAME, else of the first interface. Raises SyncError.
    """
    address = own_address(host, os.environ.get("GLOO_SOCKET_IFNAME", ""))
    try:
        listener = listening(address)
        return TCPStore(
            address,
            int(listener.getsockname()[1]),
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
            master_listen_fd=listener.detach(),
        )
    except (OSError, RuntimeError) as error:
        raise SyncError(f"cannot listen for the engines on {host} ({address}): {error}") from error


def connect(host: str, port: int, name: str, timeout_s: float, answer_s: float) -> Store:
    """Connect to the store at `host:port`, for group `name`.

    Raises SyncError after `timeout_s`, or if nothing answers there for `answer_s`, not even with a refusal: a node
    accepts connections however busy the store's process is.
    """
    wait_s = min(answer_s, timeout_s)
    if why := unreachable(host, port, wait_s, listens=False):
        raise SyncError(
            f"{socket.gethostname()} gets no answer from the weight sync store at {host}:{port} within {wait_s:g} s "
            f"({why}): the link to {host} is cut, or something drops what is sent there"
        )
    try:
        store = connect_store(host, port, timeout_s)
    except (RuntimeError, OSError) as error:
        raise SyncError(
            f"{socket.gethostname()} cannot reach the weight sync store at {host}:{port} within {timeout_s:g} s: "
            f"{str(error).splitlines()[0]}. Is the actor alive, and can this node connect to it?"
        ) from error
    return signed(store, f"sync/{name}")


def read(store: Store, key: str) -> str | None:
    """Return the text under `key`, None if nobody wrote it. Raises RuntimeError when the store's process is gone."""
    return store.get(key).decode() if store.check([key]) else None


def first_of_each(members: Iterable[Member]) -> list[Member]:
    """Return one member for each host and address: what one of them can reach the others there can, too."""
    found: dict[tuple[str, str], Member] = {}
    for member in members:
        found.setdefault((member.host, member.address), member)
    return list(found.values())


def unreached(me: Member, members: Sequence[Member], timeout_s: float) -> str:
    """Say what this member cannot reach, and the remedy; empty when all is well. Tries one member of each host."""
    others = [other for other in first_of_each(members) if other.host != me.host]
    if not others or me.rank not in [member.rank for member in first_of_each(members)]:
        return ""
    with ThreadPoolExecutor(min(_PROBES, len(others))) as threads:
        failures = [text for text in threads.map(lambda other: _try_to_reach(me, other, timeout_s), others) if text]
    return "; ".join(failures[:3])


def _try_to_reach(me: Member, other: Member, timeout_s: float) -> str:
    try:
        socket.create_connection((other.address, other.port), timeout_s, (me.address, 0)).close()
    except OSError as error:
        return (
            f"{me.host} ({me.interface}, {me.address}) cannot reach {other.host} ({other.interface}, "
            f"{other.address}): {error.strerror or error}. Set sync.interface to a network that joins both nodes, "
            f"or leave it empty to take the one that reaches {other.host}"
        )
    return ""


def share_gpus(devices: Sequence[str], actors: int) -> bool:
    """Tell whether every engine rank has an actor rank on its GPU. `devices`: of the members, the actor's first."""
    return all(devices) and set(devices[actors:]) <= set(devices[:actors])


def choose(
    wanted: Sequence[str],
    nodes: Sequence[str],
    devices: Sequence[str],
    colocated: bool = False,
    inside: bool = False,
    shared_gpus: bool = False,
) -> tuple[str, str]:
    """Choose a backend from what each member wants, its node, and its GPU ("" without one); return it and the reason.

    `colocated`: actor and engines share their slots, which without GPUs nothing else shows. `inside`: no weights have
    to leave their node, because on each there are actor ranks that hold the whole model. `shared_gpus`: what
    `share_gpus` says.

    Raises ConfigError, without a name for the members, where they cannot agree.
    """
    if len(set(wanted)) > 1:
        raise ConfigError(f"its members use different backends: {', '.join(sorted(set(wanted)))}")
    (backend,) = set(wanted)
    inside = inside or len(set(nodes)) == 1
    if backend == "ipc" and all(devices) and not shared_gpus:
        raise ConfigError(
            "sync.backend = ipc hands weights over on the GPU that an actor rank and an engine rank share "
            "(train.colocate_all), and here are engine ranks whose GPU has no actor rank: use auto"
        )
    if backend == "ipc" and not (inside or shared_gpus):
        raise ConfigError(
            f"sync.backend = ipc joins roles of one node, and these are on {', '.join(sorted(set(nodes)))}: use auto"
        )
    if backend == "nccl" and not all(devices):
        raise ConfigError("sync.backend = nccl needs a GPU and a torch with NCCL for every member: use auto or gloo")
    if backend != "auto":
        return backend, "sync.backend says so"
    if shared_gpus:
        return "ipc", "each engine rank shares its GPU with an actor rank"
    if colocated and inside and not all(devices):
        return "ipc", "actor and engines share their slots (train.colocate_all)"
    if not all(devices):
        return "gloo", "not every member has a GPU"
    if len(set(devices)) < len(devices):
        return "gloo", "NCCL refuses two ranks on one GPU, and there are engine ranks whose GPU has no actor rank"
    return "nccl", "every member has a GPU of its own"


def call_roll(store: Store, joining: Membership, ended: Callable[[], str]) -> dict[str, Any]:
    """Make the roster at rank 0 from what each member wrote, so that the others read one key: linear in the members.

    It has the members, the backend and why, and an error instead where the members cannot work together.
    `ended` says why the group has ended meanwhile.
    """
    keys = [f"member/{rank}" for rank in range(joining.world)]
    wait_until(lambda: bool(ended()) or store.check(keys), joining.timeout_s)
    members = [Member(**json.loads(text)) for key in keys if (text := read(store, key))]
    error, backend, why = ended() or _objection(members, joining), "", ""
    if not error:
        try:
            wanted, nodes, devices = zip(*((m.backend, m.node, m.device) for m in members), strict=True)
            inside = joining.whole and set(nodes[: joining.actors]) == set(nodes[joining.actors :])
            backend, why = choose(
                wanted, nodes, devices, joining.colocated, inside, share_gpus(devices, joining.actors)
            )
        except ConfigError as refused:
            error = str(refused)
    found = {"error": error, "backend": backend, "why": why, "token": secrets.token_hex(8)}
    return {"members": [asdict(member) for member in members], **found}


def _objection(members: list[Member], joining: Membership) -> str:
    if len(members) < joining.world:
        missing = sorted(set(range(joining.world)) - {member.rank for member in members})
        here = ", ".join(str(member) for member in members)
        late = f"rank {missing} of {joining.world} did not come within {joining.timeout_s:g} s (timeout.sync)"
        return f"{late}; here: {here}"
    hidden = [member for member in members if is_loopback(member.address)]
    if hidden and len({member.host for member in members}) > 1:
        return (
            f"{hidden[0]} would be reached at {hidden[0].address}, which exists inside its own node only. "
            f"Set sync.interface to the network between the nodes."
        )
    return ""


@dataclass(frozen=True, slots=True)
class Membership:
    """Say how a rank joins a group; the same on all members except `rank`, `label` and `node`."""

    name: str
    rank: int  # the actor's ranks count first
    world: int
    actors: int  # how many of `world` are the actor's
    host: str  # name of the node with the store
    port: int
    timeout_s: float
    backend: str = "auto"
    interface: str = ""  # empty: the one that reaches the store
    label: str = ""  # how messages name the rank
    node: str = ""  # ranks of one node share it; empty: the host name
    directory: str = ""  # the disk backend's; all members see it
    colocated: bool = False  # actor and engines share their slots
    whole: bool = False  # each of the actor's ranks holds the whole model
    silence_s: float = 15.0  # a member that is not heard for so long during an update has broken it


@dataclass(frozen=True, slots=True)
class Member:
    """Tell the others about a rank."""

    rank: int
    label: str
    node: str
    host: str  # its name for itself
    pid: int
    address: str  # the others connect to it
    interface: str
    backend: str  # sync.backend, as this member has it
    device: str  # its GPU; empty without one
    port: int = 0  # port that is open while the others test whether they can reach the rank
    heartbeat_port: int = 0  # port to which its peers send heartbeats

    def __str__(self) -> str:
        return f"{self.label} on {self.node} (pid {self.pid})"

    @property
    def end(self) -> str:
        """Name the member as an end of a link."""
        return f"{self.label} on {self.node} ({self.interface}, {self.address})"


def nccl_available() -> bool:
    """Tell whether this process has a GPU and a torch with NCCL."""
    return torch.cuda.is_available() and torch.distributed.is_nccl_available()


def device_name() -> str:
    """Return a name that no two GPUs share, of the current one; empty without one."""
    return device_names()[torch.cuda.current_device()] if torch.cuda.is_available() else ""


def device_names() -> list[str]:
    """Return `device_name` of every GPU that this process sees, by its number here."""
    return [str(torch.cuda.get_device_properties(number).uuid) for number in range(torch.cuda.device_count())]
