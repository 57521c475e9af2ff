"""Which ports the processes of a run listen on, and strangers that come to each of them."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import psutil
from attackers import GREETING
from warm_runs import commands

_MAGIC = 0x3C85F7CE  # of torch's TCPStore: a client begins with it
_VALIDATE, _SET, _ADD, _DELETE = 0, 1, 4, 8  # its commands, by number
HALF_OPEN = 40  # connections to a port that say half a message and stay


@dataclass(frozen=True, slots=True)
class Listening:
    """A socket that takes what strangers send."""

    pid: int
    command: str
    kind: str  # tcp, udp
    address: str
    port: int

    @property
    def is_torchrun(self) -> bool:
        return "slurm_rlhf.workers.torchrun" in self.command


def listening(pids: Iterable[int]) -> list[Listening]:
    """What those processes listen on, in whichever network namespace each is."""
    found, forked = [], commands()
    for pid in pids:
        try:
            process = psutil.Process(pid)
            line = forked.get(pid) or " ".join(process.cmdline())
            for each in process.net_connections("inet"):
                if each.status == psutil.CONN_LISTEN or (each.type == socket.SOCK_DGRAM and not each.raddr):
                    kind = "udp" if each.type == socket.SOCK_DGRAM else "tcp"
                    found.append(Listening(pid, line, kind, each.laddr.ip, each.laddr.port))
        except psutil.NoSuchProcess:
            continue
    return found


def store_commands(dice: random.Random) -> bytes:
    """What a client of torch's TCPStore sends that wants to do harm: commands as the protocol has them.

    It counts ranks that have not come, deletes and overwrites keys, and asks to wait for a key that nobody sets.
    """

    def text(value: str | bytes) -> bytes:
        data = value.encode() if isinstance(value, str) else value
        return struct.pack("<Q", len(data)) + data

    said = struct.pack("<BI", _VALIDATE, _MAGIC)
    for key in ("/init/", "/slurm_rlhf/joined", "/default_pg/0//cpu//0/rank_0", "/verdict", "/refused"):
        said += struct.pack("<B", _DELETE) + text(key)
        said += struct.pack("<B", _ADD) + text(key) + struct.pack("<q", dice.randrange(1000))
    return said


class Strangers:
    """`with Strangers(ports) as strangers:` come to each port again and again until the block ends.

    `sent` counts what came through, by kind, and `refused` how often nobody listened any more.
    """

    def __init__(self, ports: Iterable[Listening], recorded: list[bytes], pause_s: float = 0.002) -> None:
        self.sent: Counter[str] = Counter()
        self.refused = 0
        self.rounds = 0
        """How often each kind of message has come to each port."""
        self._ports = list(ports)
        self._recorded = recorded
        self._pause_s = pause_s
        self._open: Counter[int] = Counter()
        self._held: list[socket.socket] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._come, daemon=True)

    def __enter__(self) -> Strangers:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        for each in self._held:
            each.close()

    def _come(self) -> None:
        dice = random.Random(0)
        kinds: dict[str, Callable[[], bytes]] = {
            "garbage": lambda: dice.randbytes(dice.randrange(1, 2000)),
            "replay": lambda: dice.choice(self._recorded),
            "store commands": lambda: store_commands(dice),
            "gloo's greeting": lambda: struct.pack("<Q", dice.randrange(64)),
            "half a message": lambda: dice.choice([bytes(4), store_commands(dice)[:9], GREETING[:20]]),
        }
        while True:
            for port in self._ports:
                for kind, make in kinds.items():
                    if self._over.wait(self._pause_s):
                        return
                    self._send(port, kind, make())
            self.rounds += 1

    def _send(self, port: Listening, kind: str, data: bytes) -> None:
        if port.kind == "udp":
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
                stranger.sendto(data[:1000], (port.address, port.port))
            self.sent[kind] += 1
            return
        try:
            stranger = socket.create_connection((port.address, port.port), timeout=5)
        except OSError:
            self.refused += 1
            return
        with contextlib.suppress(OSError):
            stranger.sendall(data)
        self.sent[kind] += 1
        if kind == "half a message" and self._open[port.port] < HALF_OPEN:
            self._open[port.port] += 1
            self._held.append(stranger)
        else:
            stranger.close()
