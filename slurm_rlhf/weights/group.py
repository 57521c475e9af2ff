"""A process group across separately started processes, besides their own default groups and outside every WORLD."""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed import Store

from slurm_rlhf.cluster.network import address_of, address_towards, interface_of, link_mbits, listening
from slurm_rlhf.config.keys import all_keys
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import ConfigError, PlacementError, SyncError
from slurm_rlhf.polling import in_thread, wait_until
from slurm_rlhf.records import SyncConnection
from slurm_rlhf.weights.backends import Backend, TransportFailure
from slurm_rlhf.weights.backends.gloo import GlooTransport
from slurm_rlhf.weights.diagnosis import FailureBoard, Heartbeat
from slurm_rlhf.weights.rendezvous import (
    Member,
    Membership,
    call_roll,
    connect,
    device_name,
    first_of_each,
    nccl_available,
    read,
    unreached,
)
from slurm_rlhf.weights.transfer_plan import SyncPlan, TransferLayout, make_plan
from slurm_rlhf.wire import timeouts

log = logging.getLogger(__name__)

Described = Sequence[Sequence[Any]]
"""[[name, shape, dtype], ...] of parameters, in layer order."""

_OPERATION = 0.5
"""An operation's share of timeout.sync: members have to find out who is behind before the conductor gives up on all."""


class SyncGroup:
    """Join a rank to a group. `open` blocks until all have come; `abort` may be called from any thread at any time.

    A group that failed or was aborted is spent: the survivors join a new one, under a new name.
    """

    def __init__(self, joining: Membership) -> None:
        """Describe this rank. Raises ConfigError for a backend or an interface that this node does not have."""
        self.name = joining.name
        self.rank = joining.rank
        self.world = joining.world
        self.actors = joining.actors
        self.timeout_s = joining.timeout_s
        self.directory = joining.directory
        self._joining = joining
        self.members: tuple[Member, ...] = ()
        self.backend = ""  # chosen by rank 0 for all members
        self.store: Store
        self.board: FailureBoard
        self.control: GlooTransport
        self.late = False  # True: its deadline has ended it
        self.quiet: tuple[int, ...] = ()  # members whose heartbeats did not come during an update
        self.heartbeat: Heartbeat
        self.silence_s = joining.silence_s
        self.dropped = threading.Event()  # its connections were closed because it failed
        self.ended = ""  # why the group is spent; empty while it is not
        self._holds: list[GlooTransport | Backend] = []
        interface = joining.interface
        address = address_of(interface, "sync.interface") if interface else _towards(joining.host)
        self.me = Member(
            joining.rank,
            joining.label or f"rank {joining.rank}",
            joining.node or socket.gethostname(),
            socket.gethostname(),
            os.getpid(),
            address,
            interface or interface_of(address) or address,
            _known(joining.backend),
            device_name() if nccl_available() else "",
        )

    @property
    def peers(self) -> tuple[int, ...]:
        """Return all ranks but this one."""
        return tuple(rank for rank in range(self.world) if rank != self.rank)

    def open(self) -> None:
        """Wait for the other members and connect to them.

        Raises SyncError naming the ranks that did not come within `timeout_s`, or why these members cannot talk.
        """
        try:
            where = (self._joining.host, self._joining.port, self.name)
            self.store = connect(*where, self.timeout_s, self.silence_s)
            self.board = FailureBoard(self.store, self.me, self.timeout_s, self.silence_s)
            with closing(listening(self.me.address)) as listener:
                self.heartbeat = Heartbeat(self.me.address, self.silence_s)
                port = int(listener.getsockname()[1])
                self.me = replace(self.me, port=port, heartbeat_port=self.heartbeat.port)
                self._meet()
                self._try_links()
            # Otherwise gloo waits for the address of a member that has died, and nothing can wake it.
            met = partial(self._all_at, "listening", range(self.world), "the members' listening sockets")
            self.control = GlooTransport(self.store, self.rank, self.world, self.me.address, self.timeout_s, met)
            self._holds.append(self.control)
        except (TransportFailure, RuntimeError, OSError) as error:
            raise SyncError(f"{self.me} could not connect to the members of group {self.name}: {error}") from error
        if self.ended:  # aborted while the connections were being made
            self.abort(self.ended)
        self.check()

    @property
    def on_gpus(self) -> bool:
        """Tell whether the weights stay on GPUs all the way."""
        return self.backend in ("nccl", "ipc") and all(member.device for member in self.members)

    def layout(self, zero_stage: int) -> TransferLayout:
        """Return the node of each member; with ipc between GPUs its GPU, which the bytes do not leave.

        Raises SyncError when the actor or the engines have no rank in the group.
        """
        inside = self.backend == "ipc" and self.on_gpus
        nodes = [member.device if inside else member.node for member in self.members]
        chunked = self.backend == "gloo" or (self.backend == "ipc" and not inside)
        ends = tuple(nodes[: self.actors]), tuple(nodes[self.actors :])
        return TransferLayout(*ends, zero_stage, chunked)

    def agree(self, fingerprint: str) -> None:
        """Raise SyncError unless rank 0 has the same plan: members with two plans would wait for each other."""
        if self.rank == 0:
            try:
                self.store.set("plan", fingerprint)
            except RuntimeError as error:
                raise SyncError(f"group {self.name}: the store is gone: {error}") from error
            return
        self.wait_for(lambda: self.store.check(["plan"]), f"the plan of {self.members[0]}")
        leading = read(self.store, "plan")
        if leading != fingerprint:
            raise SyncError(
                f"{self.me} and {self.members[0]} plan different transfers ({fingerprint} and {leading}): they must "
                f"have the same parameters, ds.zero_stage and sync.bucket_mb"
            )

    def adopt(self, backend: Backend) -> None:
        """Abort and close `backend` with the group."""
        self._holds.append(backend)
        if self.ended:
            backend.abort()

    def wait_for(self, ready: Callable[[], bool], what: str) -> None:
        """Poll `ready` within the time-out. Raises SyncError naming `what`, or why the group ended meanwhile.

        Waits a little longer than the time-out: rank 0 may give up at the same time, and knows more.
        """

        def poll() -> tuple[bool, str]:
            limit_s, refusal = self.timeout_s + timeouts.GROUP_MARGIN_S, self.board.refusal
            came = wait_until(lambda: bool(self.ended or refusal()) or ready(), limit_s)
            return came, refusal() or ""

        # In a thread, because a store behind a cut link does not answer until TCP gives up.
        try:
            came, refused = in_thread(poll, "sync-wait").result(self.timeout_s + 2 * timeouts.GROUP_MARGIN_S)
        except TimeoutError:
            came, refused = False, ""
        except RuntimeError as error:
            raise SyncError(f"group {self.name}: the process that holds its store is gone: {error}") from error
        self.ended = self.ended or refused
        if not came and not self.ended:
            raise SyncError(f"group {self.name}: {what} did not come within {self.timeout_s:g} s (timeout.sync)")
        self.check()

    def check(self) -> None:
        """Raise SyncError if the group has ended."""
        if self.ended:
            raise SyncError(f"group {self.name} has ended: {self.ended}; its members have to join a new one")

    def abort(self, reason: str, known: bool = False) -> None:
        """Wake every thread that waits on the group, in this process and, as connections close, in the others.

        `known`: `reason` is a verdict, and must not be posted as a refusal of this rank.
        """
        if not known and not self.ended and not self.late and hasattr(self, "board"):
            self.board.post(reason)  # before the others see the connections close
        self.ended = self.ended or reason
        self.drop()
        self._stop_heartbeat()

    def drop(self) -> None:
        """Close the connections of a group that failed, before it is known why."""
        for held in reversed(self._holds):
            held.abort()
        self.dropped.set()

    def close(self) -> None:
        """Leave a group that works. The members do this at the same time, after their last update."""
        self.ended = self.ended or "it was closed"
        for held in reversed(self._holds):
            held.close()
        self._stop_heartbeat()

    def report_silence(self, quiet: tuple[int, ...]) -> None:
        """Tell the others whom this rank has not heard from, before it drops its connections."""
        self.quiet = quiet
        self.board.post(quiet=quiet)

    def _stop_heartbeat(self) -> None:
        if hasattr(self, "heartbeat"):
            self.heartbeat.close()

    def _meet(self) -> None:
        mine = json.dumps(asdict(self.me))
        if self.store.compare_set(f"member/{self.rank}", "", mine).decode() != mine:
            other = Member(**json.loads(read(self.store, f"member/{self.rank}") or "{}"))
            raise SyncError(
                f"rank {self.rank} of group {self.name} is taken already by {other}; a group that is built again needs "
                "a new name"
            )
        if self.rank == 0:
            self.store.set("roster", json.dumps(call_roll(self.store, self._joining, lambda: self.ended)))
        else:
            self.wait_for(lambda: self.store.check(["roster"]), "the roster that rank 0 writes when all are there")
        roster = json.loads(read(self.store, "roster") or "{}")
        if roster["error"]:
            raise SyncError(f"group {self.name}: {roster['error']}")
        self.members = tuple(Member(**member) for member in roster["members"])
        self.backend = roster["backend"]
        self.heartbeat.start(self.members, self.rank, roster["token"])
        if self.rank == 0:
            log.info("weight transfer group %s uses %s: %s", self.name, self.backend, roster["why"])

    def _all_at(self, place: str, ranks: Sequence[int], what: str) -> None:
        """Wait until rank 0 has seen all of `ranks` reach `place`, a point of the start. Raises SyncError."""
        self.store.set(f"{place}/{self.rank}", "")
        if self.rank == 0:
            keys = [f"{place}/{rank}" for rank in ranks]
            self.wait_for(lambda: self.store.check(keys), what)
            self.store.set(place, "")
        self.wait_for(lambda: self.store.check([place]), what)

    def _try_links(self) -> None:
        """Raise SyncError naming two hosts and their interfaces where one cannot reach the other.

        Else the connections would be waited for as long as the time-out, and nobody would know whose fault it is.
        """
        if len({member.host for member in self.members}) == 1:
            return
        failure = unreached(self.me, self.members, min(timeouts.GROUP_REACH_S, self.timeout_s / 2))
        if failure:
            self.abort(failure)
            raise SyncError(f"group {self.name}: {failure}")
        first = [member.rank for member in first_of_each(self.members)]
        self._all_at("links", first, "the message of all nodes that they can reach the others")


_newest: list[SyncGroup] = []
"""The group that this process has begun to form last."""


def abort_newest() -> None:
    """Abort the group that this process is forming, or has formed last: a member of it is gone. For any thread."""
    for group in list(_newest):
        group.abort("an engine was lost before the group was formed")


def join(joining: Membership) -> SyncGroup:
    """Build a `SyncGroup` and wait until it is connected. Raises SyncError, ConfigError."""
    group = SyncGroup(joining)
    _newest[:] = [group]
    group.open()
    log.info("%s joined weight transfer group %s of %d ranks", group.me, group.name, group.world)
    return group


def join_run(config: Config, label: str, parameters: Described, group: dict[str, Any]) -> tuple[SyncGroup, SyncPlan]:
    """Join the group that `group` describes with the settings of a run, and plan the transfer of `parameters`."""
    sync = config.sync
    settings = {
        "timeout_s": _OPERATION * config.timeout.sync,
        "silence_s": config.timeout.sync_silence,
        "backend": sync.backend,
        "interface": sync.interface,
        "directory": str(Path(config.run_dir) / "sync"),
        "colocated": config.train.colocate_all,
        "whole": config.ds.zero_stage < 3,
    }
    joined = join(Membership(label=label, **{**settings, **group}))
    nbytes = sync.bucket_size_mb(joined.on_gpus) << 20
    return joined, make_plan(parameters, nbytes, joined.layout(config.ds.zero_stage))


def connection(group: SyncGroup) -> SyncConnection:
    """Return how this rank is connected."""
    over_network = group.backend in ("gloo", "nccl")
    mbits = link_mbits(group.me.interface) if over_network else 0
    return SyncConnection(group.backend, group.me.interface, group.me.address, group.me.node, mbits)


def _known(backend: str) -> str:
    known = all_keys()["sync.backend"].choices
    if backend not in known:
        raise ConfigError(f"sync.backend: {backend!r} is not known; valid: {', '.join(known)}")
    if backend == "nccl" and not nccl_available():
        raise ConfigError("sync.backend: nccl needs a GPU and a torch that has NCCL; auto and gloo run here")
    return backend


def _towards(host: str) -> str:
    try:
        return address_towards(host)
    except PlacementError as error:
        raise SyncError(f"the weight transfer's store is on {host}: {error}") from error
