"""One process of COMM_WORLD: holds the worker of its rank; that of rank 0 also the conductor.

The worker is a child, so that MPI's library stays out of the process that computes, and so that its end is seen and
told by a process that lives on.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import IO, Any

from slurm_rlhf.config.roles import role_order
from slurm_rlhf.launch.channel import Channel
from slurm_rlhf.launch.child_process import bound_to_parent, exit_text
from slurm_rlhf.launch.mpi.communicator import World
from slurm_rlhf.launch.mpi.worker import MpiWorker, Order, meeting_socket
from slurm_rlhf.launch.node import IGNORED
from slurm_rlhf.launch.node_environment import without_injected
from slurm_rlhf.placement.rank_map import RankMap

_POLL_S = 0.1
_KEYS = Path(".control") / "keys.json"

Seat = tuple[str, str, int]


def follow(world: World, ranks: RankMap, seat: Seat, start_s: float) -> None:
    """What every rank but 0 does until the conductor is gone."""
    with _signals(lambda number: None):
        order = world.broadcast(timeout_s=start_s)
        if order is None:
            return
        holder = _Holder(world, ranks, seat, Order(**order))
        while not holder.left:
            holder.step()
            time.sleep(_POLL_S)


def lead(world: World, ranks: RankMap, seat: Seat, start_s: float, conductor: list[str], run_dir: Path) -> int:
    """What rank 0 does: starts the command `conductor` (and `--channel=N`), passes on words; its exit code."""
    ours, theirs = socket.socketpair()
    # In a session of its own: a launcher that kills rank 0's process group leaves it the time to say what happened.
    child = subprocess.Popen(
        bound_to_parent([*conductor, f"--channel={theirs.fileno()}"], signal.SIGTERM),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,  # mpirun gives ranks a terminal, whatever its own output is
        pass_fds=[theirs.fileno()],
        start_new_session=True,
        env=without_injected(os.environ),
    )
    theirs.close()
    assert child.stdout is not None
    copying = threading.Thread(target=_copy, args=(child.stdout,), name="conductor-output", daemon=True)
    copying.start()
    channel = Channel(ours)

    def relay(number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            child.send_signal(number)

    with _signals(relay):
        order = _order(channel, child, ranks, run_dir)
        world.broadcast(order, start_s)
        if order is not None:
            holder = _Holder(world, ranks, seat, Order(**order))
            _serve(holder, channel, child)
    copying.join()
    return code if (code := child.wait()) >= 0 else 128 - code


def _copy(output: IO[bytes]) -> None:
    while data := os.read(output.fileno(), 1 << 16):
        sys.stdout.buffer.write(data)
        sys.stdout.flush()


def _order(channel: Channel, child: subprocess.Popen[bytes], ranks: RankMap, run_dir: Path) -> dict[str, Any] | None:
    """Collects the conductor's word on each role; None when it ends instead."""
    arguments: dict[str, list[str]] = {}
    environment: dict[str, Mapping[str, Mapping[str, str]]] = {}
    while len(arguments) < len(ranks.roles):
        for words in channel.receive():
            if "start" in words:
                arguments[words["start"]] = words["arguments"]
                environment[words["start"]] = words["environment"]
        if child.poll() is not None:
            return None
        time.sleep(_POLL_S)
    return {
        "run_id": secrets.token_hex(6),
        "run_dir": str(run_dir),
        "keys": (run_dir / _KEYS).read_text(encoding="utf-8"),
        "arguments": arguments,
        "environment": environment,
    }


def _serve(holder: _Holder, channel: Channel, child: subprocess.Popen[bytes]) -> None:
    """Rank 0 between the conductor and the other ranks, until the conductor has ended."""
    gone = False
    while child.poll() is None:
        for words in channel.receive():
            if "stop" in words:
                holder.order_all(stop=words["grace_s"])
        holder.step()
        for end in holder.ended:
            channel.send(ended=end)
        holder.ended.clear()
        if holder.stopped == holder.world.size and not gone:
            gone = True
            channel.send(gone=True)
        time.sleep(_POLL_S)
    holder.order_all(leave=True)
    while not holder.left:
        holder.step()


class _Holder:
    """A rank's worker and what COMM_WORLD says about it."""

    def __init__(self, world: World, ranks: RankMap, seat: Seat, order: Order) -> None:
        self.world = world
        self.left = False
        """Told to leave; nothing of the worker is left."""
        self.ended: list[dict[str, str]] = []
        """On rank 0: workers that ended unasked."""
        self.stopped = 0
        """On rank 0: ranks that have ended their workers as they were told."""
        self._told = self._asked = False
        role = seat[0]
        peers = world.split(role_order(role)[0])
        store, meeting = meeting_socket(ranks, role) if peers.rank == 0 else (None, None)
        meeting = peers.broadcast(meeting)
        self._worker = MpiWorker(order, ranks, seat, meeting, store)
        if store is not None:
            store.close()

    def order_all(self, **words: Any) -> None:
        for rank in range(self.world.size):
            self.world.tell(rank, words)

    def step(self) -> None:
        """Look at the worker, and do what was told since the last step."""
        code = self._worker.code()
        if code is not None and not self._told and not self._asked:
            self._told = True
            worker = self._worker
            how = exit_text(code)
            end = {"role": worker.role, "node": worker.node, "how": how, "log": str(worker.log)}
            self.world.tell(0, {"ended": end})
        while (heard := self.world.hear()) is not None:
            self._obey(heard[1])

    def _obey(self, words: Mapping[str, Any]) -> None:
        if "ended" in words:
            self.ended.append(words["ended"])
        elif "stopped" in words:
            self.stopped += 1
        elif "stop" in words:
            self._asked = True
            self._worker.end(words["stop"])
            self.world.tell(0, {"stopped": True})
        elif "leave" in words:
            self._worker.end(0)
            self.left = True


@contextmanager
def _signals(relay: Any) -> Iterator[None]:
    """The conductor decides what a step's signals mean; on other ranks they mean nothing."""

    def handle(number: int, frame: FrameType | None) -> None:
        relay(number)

    before = {number: signal.signal(number, handle) for number in IGNORED}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
