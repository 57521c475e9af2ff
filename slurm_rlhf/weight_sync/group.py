"""A process group across separately started processes, beside their own default groups and outside every WORLD."""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, replace
from typing import Any

from torch.distributed import PrefixStore, Store

from slurm_rlhf.cluster.network import address_of, address_towards, interface_of, is_loopback
from slurm_rlhf.errors import ConfigError, PlacementError, SyncError
from slurm_rlhf.polling import wait_until
from slurm_rlhf.weight_sync.backend_choice import BACKENDS, choose, share_gpus
from slurm_rlhf.weight_sync.backends.backend import Carrier
from slurm_rlhf.weight_sync.backends.gloo import GlooTransport
from slurm_rlhf.weight_sync.backends.transport import Transport, TransportFailure
from slurm_rlhf.weight_sync.diagnosis import FailureBoard, Names
from slurm_rlhf.weight_sync.gpu import device_address, device_name, nccl_available
from slurm_rlhf.weight_sync.interfaces import rail_of
from slurm_rlhf.weight_sync.layout import Layout
from slurm_rlhf.weight_sync.liveness import Pulse
from slurm_rlhf.weight_sync.member import Member, Membership
from slurm_rlhf.weight_sync.reachability import first_of_each, listen, unreachable
from slurm_rlhf.weight_sync.store import connect, read

log = logging.getLogger(__name__)

_MARGIN_S = 2.0
_KNOCK_S = 10.0
_LOOK_S = 0.1


class SyncGroup:
    """One rank's membership. `open` blocks until all have come; `abort` may be called from any thread at any time.

    A group that failed or was aborted is spent: the survivors join a new one, under a new name, over the same store.
    """

    def __init__(self, joining: Membership) -> None:
        """Raises ConfigError for a backend or an interface that this node does not have."""
        self.name = joining.name
        self.rank = joining.rank
        self.world = joining.world
        self.actors = joining.actors
        self.timeout_s = joining.timeout_s
        self.directory = joining.directory
        self._colocated, self._whole = joining.colocated, joining.whole
        self.members: tuple[Member, ...] = ()
        self.backend = ""  # that the members agreed on
        self.store: Store
        self.board: FailureBoard
        self.control: GlooTransport
        self._where = (joining.host, joining.port)
        self.late = False  # it was its deadline that ended it
        self.quiet: tuple[int, ...] = ()  # whose signs of life stayed out during an update
        self.pulse: Pulse
        self._silence_s = joining.silence_s
        self._ended = ""
        self._holds: list[Transport | Carrier] = []
        rails = [name.strip() for name in joining.interface.split(",") if name.strip()]
        interface = rail_of(rails, device_address(), joining.rank) if rails else ""
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
        """All ranks but this one."""
        return tuple(rank for rank in range(self.world) if rank != self.rank)

    def open(self) -> None:
        """Meet the other members and connect to them.

        Raises SyncError naming the ranks that did not come within `timeout_s`, or why these members cannot talk.
        """
        try:
            self.store = PrefixStore(f"sync/{self.name}", connect(*self._where, self.timeout_s, self._silence_s))
            self.board = FailureBoard(self.store, self.rank, str(self.me))
            with closing(listen(self.me.address)) as door:
                self.pulse = Pulse(self.me.address, self._silence_s)
                self.me = replace(self.me, port=int(door.getsockname()[1]), pulse=self.pulse.port)
                self._meet()
                self._try_roads()
            self.control = GlooTransport(self.store, self.rank, self.world, self.me.address, self.timeout_s)
            self._holds.append(self.control)
        except (TransportFailure, RuntimeError, OSError) as error:
            raise SyncError(f"{self.me} could not connect to the members of group {self.name}: {error}") from error
        if self._ended:  # aborted while the connections were being made
            self.abort(self._ended)
        self.check()

    @property
    def on_gpus(self) -> bool:
        """Whether the weights stay on GPUs all the way."""
        return self.backend in ("nccl", "ipc") and all(member.device for member in self.members)

    def layout(self, zero_stage: int) -> Layout:
        """Where the members are; with ipc between GPUs, on which of them each is: bytes stay on a GPU then.

        Raises SyncError when the actor or the engines have no rank in the group.
        """
        inside = self.backend == "ipc" and self.on_gpus
        nodes = [member.device if inside else member.node for member in self.members]
        rails = tuple(member.interface for member in self.members)
        return Layout(tuple(nodes[: self.actors]), tuple(nodes[self.actors :]), zero_stage, rails)

    def agree(self, fingerprint: str) -> None:
        """Raise SyncError unless rank 0 says the same: members with two plans would wait for each other's bytes."""
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

    def adopt(self, carrier: Carrier) -> None:
        """Abort and close `carrier` with the group."""
        self._holds.append(carrier)
        if self._ended:
            carrier.abort()

    def refuse(self, reason: str) -> None:
        """Leave the group and tell the others why."""
        self.abort(reason)

    def wait_for(self, ready: Callable[[], bool], what: str) -> None:
        """Poll `ready` within the time-out. Raises SyncError naming `what`, or why the group ended meanwhile.

        Waits a little longer than the time-out: if rank 0 gives up at the same time, it knows more. Raises
        TransportFailure where members are not heard any more.
        """
        found: list[str | Exception | None] = []
        came: list[bool] = []

        def poll() -> None:
            refusal = self.board.refusal
            try:
                came.append(wait_until(lambda: bool(self._ended or refusal()) or ready(), self.timeout_s + _MARGIN_S))
                found.append(refusal())
            except Exception as error:
                found.append(error)

        # In a thread, because a store behind a cut link does not answer as long as TCP tries.
        asking = threading.Thread(target=poll, name="sync-wait", daemon=True)
        asking.start()
        end = time.monotonic() + self.timeout_s + 2 * _MARGIN_S
        while asking.is_alive() and not self.quiet and time.monotonic() < end:
            asking.join(_LOOK_S)
            if self._ended:
                end = min(end, time.monotonic() + _MARGIN_S)
        if not found and self.quiet:
            raise TransportFailure(f"members are not heard any more, {what} did not come", peer_left=False)
        self._conclude(found[0] if found else None, bool(came and came[0]), what)

    def _conclude(self, refused: str | Exception | None, came: bool, what: str) -> None:
        """The end of a wait."""
        if isinstance(refused, RuntimeError):
            raise SyncError(f"group {self.name}: the process that holds its store is gone: {refused}") from refused
        if isinstance(refused, Exception):
            raise refused
        if refused and not self._ended:
            self._ended = refused
        if not came and not self._ended:
            raise SyncError(f"group {self.name}: {what} did not come within {self.timeout_s:g} s (timeout.sync)")
        self.check()

    def check(self) -> None:
        """Raise SyncError if the group has ended."""
        if self._ended:
            raise SyncError(f"group {self.name} has ended: {self._ended}; its members have to join a new one")

    @property
    def ended(self) -> str:
        """Why the group is spent; empty while it is not."""
        return self._ended

    def abort(self, reason: str) -> None:
        """Wake every thread that waits on the group, in this process and, as connections close, in the others."""
        if not self._ended and not self.late and hasattr(self, "board"):
            self.board.post(reason)  # before the others see the connections close
        self._ended = self._ended or reason
        self.drop()
        self._still()

    def drop(self) -> None:
        """Close the connections of a group that failed, before it is known why."""
        for held in reversed(self._holds):
            held.abort()

    def close(self) -> None:
        """Leave in peace. The members do this at the same time, after their last update."""
        self._ended = self._ended or "it was closed"
        for held in reversed(self._holds):
            held.close()
        self._still()

    def miss(self, quiet: tuple[int, ...]) -> None:
        """Tell the others whom this rank has not heard from, before it drops its connections."""
        self.quiet = quiet
        self.board.post(quiet=quiet)

    def names(self) -> Names:
        """How messages call the members."""
        short, ends = ({m.rank: call(m) for m in self.members} for call in (str, lambda m: m.end))
        return Names(short, ends, self.timeout_s, self._silence_s)

    def _still(self) -> None:
        if hasattr(self, "pulse"):
            self.pulse.close()

    def _meet(self) -> None:
        mine = json.dumps(asdict(self.me))
        if self.store.compare_set(f"member/{self.rank}", "", mine).decode() != mine:
            raise SyncError(
                f"rank {self.rank} of group {self.name} is taken already by "
                f"{_member(read(self.store, f'member/{self.rank}'))}; a group that is built again needs a new name"
            )
        if self.rank == 0:
            self.store.set("roster", json.dumps(self._roll_call()))
        else:
            self.wait_for(lambda: self.store.check(["roster"]), "the roster that rank 0 writes when all are there")
        roster = json.loads(read(self.store, "roster") or "{}")
        if roster["error"]:
            raise SyncError(f"group {self.name}: {roster['error']}")
        self.members = tuple(Member(**member) for member in roster["members"])
        self.backend = roster["backend"]
        self.pulse.start(self.members, self.rank, roster["token"])
        if self.rank == 0:
            log.info("weight transfer group %s uses %s: %s", self.name, self.backend, roster["why"])

    def _try_roads(self) -> None:
        """Raise SyncError naming two hosts and their interfaces where one cannot reach the other.

        Else the connections would be waited for as long as the time-out, and nobody would know whose fault it is.
        """
        if len({member.host for member in self.members}) == 1:
            return
        failure = unreachable(self.me, self.members, min(_KNOCK_S, self.timeout_s / 2))
        if failure:
            self.refuse(failure)
            raise SyncError(f"group {self.name}: {failure}")
        self.store.set(f"roads/{self.rank}", "open")
        keys = [f"roads/{member.rank}" for member in first_of_each(self.members)]
        if self.rank == 0:
            self.wait_for(lambda: self.store.check(keys), "the word of all nodes that they can reach the others")
            self.store.set("roads", "open")
        self.wait_for(lambda: self.store.check(["roads"]), "the word of all nodes that they can reach the others")

    def _roll_call(self) -> dict[str, Any]:
        """Rank 0 reads what everybody said, so that the others have one key to read: linear in the members."""
        keys = [f"member/{rank}" for rank in range(self.world)]
        wait_until(lambda: bool(self._ended) or self.store.check(keys), self.timeout_s)
        members = [_member(text) for key in keys if (text := read(self.store, key))]
        error, backend, why = self._objection(members), "", ""
        if not error:
            try:
                wanted, nodes, devices = zip(*((m.backend, m.node, m.device) for m in members), strict=True)
                inside = self._whole and set(nodes[: self.actors]) == set(nodes[self.actors :])
                twins = share_gpus(devices, self.actors)
                backend, why = choose(wanted, nodes, devices, self._colocated, inside, twins)
            except ConfigError as refused:
                error = str(refused)
        return {
            "members": [asdict(m) for m in members],
            "error": error,
            "backend": backend,
            "why": why,
            "token": secrets.token_hex(8),
        }

    def _objection(self, members: list[Member]) -> str:
        if self._ended:
            return self._ended
        if len(members) < self.world:
            missing = sorted(set(range(self.world)) - {member.rank for member in members})
            here = ", ".join(str(member) for member in members)
            return (
                f"rank {missing} of {self.world} did not come within {self.timeout_s:g} s (timeout.sync); here: {here}"
            )
        hidden = [member for member in members if is_loopback(member.address)]
        if hidden and len({member.host for member in members}) > 1:
            return (
                f"{hidden[0]} would be reached at {hidden[0].address}, which exists inside its own node only. "
                f"Set sync.interface to the network between the nodes."
            )
        return ""


def join(joining: Membership) -> SyncGroup:
    """Build a `SyncGroup` and wait until it is connected; see there. Raises SyncError, ConfigError."""
    group = SyncGroup(joining)
    group.open()
    log.info(
        "%s joined weight transfer group %s of %d ranks: %s over %s (%s)",
        group.me,
        group.name,
        group.world,
        group.backend,
        group.me.interface,
        group.me.address,
    )
    return group


def _known(backend: str) -> str:
    if backend not in BACKENDS:
        raise ConfigError(f"sync.backend: {backend!r} is not known; valid: {', '.join(BACKENDS)}")
    if backend == "nccl" and not nccl_available():
        raise ConfigError("sync.backend: nccl needs a GPU and a torch that has NCCL; auto and gloo run here")
    return backend


def _towards(host: str) -> str:
    try:
        return address_towards(host)
    except PlacementError as error:
        raise SyncError(f"the weight transfer's store is on {host}: {error}") from error


def _member(text: str | None) -> Member:
    return Member(**json.loads(text or "{}"))
