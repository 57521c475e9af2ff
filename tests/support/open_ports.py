"""Ports that the processes of a run listen on, and strangers that come to each of them."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import random
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from intruders import GREETING
from warm_runs import commands

_LISTEN, _CLOSE = "0A", "07"  # states in /proc/net; the second is that of a UDP socket without a peer
_MAGIC = 0x3C85F7CE  # a client of torch's TCPStore begins with it
_VALIDATE, _SET, _ADD, _DELETE = 0, 1, 4, 8  # numbers of TCPStore's commands
LOOK_S = 1.0  # between two looks at who listens: they take time from whoever attacks meanwhile
HALF_OPEN = 40  # connections to a port that say half a message and stay


@dataclass(frozen=True, slots=True)
class Listening:
    """A socket that takes what strangers send."""

    pid: int
    command: str
    kind: str  # tcp, udp
    address: str
    port: int


def listening(pids: Iterable[int]) -> list[Listening]:
    """Find the ports of processes, in whichever network namespace each is (psutil knows that of this one only)."""
    found, forked = [], commands()
    for pid in pids:
        proc = Path(f"/proc/{pid}")
        try:
            line = forked.get(pid) or (proc / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            links = [os.readlink(each) for each in (proc / "fd").iterdir()]
            for table in ("tcp", "tcp6", "udp", "udp6"):
                for row in (proc / "net" / table).read_text().splitlines()[1:]:
                    words = row.split()
                    if f"socket:[{words[9]}]" in links and words[3] == (_LISTEN if table.startswith("tcp") else _CLOSE):
                        address, _, port = words[1].partition(":")
                        found.append(Listening(pid, line, table[:3], _address(address), int(port, 16)))
        except OSError:  # it has ended
            continue
    return found


def _address(text: str) -> str:
    """Read an address as the kernel writes it: words of four bytes, each in the order of this machine."""
    data = b"".join(bytes.fromhex(text[at : at + 8])[::-1] for at in range(0, len(text), 8))
    return str(ipaddress.ip_address(data))


def store_commands(dice: random.Random) -> bytes:
    """Make the commands of a client of torch's TCPStore that wants to do harm, as the protocol has them.

    It counts ranks that have not come, and deletes and overwrites keys whose names it knows.
    """

    def text(value: str | bytes) -> bytes:
        data = value.encode() if isinstance(value, str) else value
        return struct.pack("<Q", len(data)) + data

    said = struct.pack("<BI", _VALIDATE, _MAGIC)
    for key in (
        "/init/",
        "/slurm_rlhf/joined",
        "/slurm_rlhf/joined/0",
        "/default_pg/0//cpu//0/rank_0",
        "/verdict",
        "/refused",
    ):
        said += struct.pack("<B", _DELETE) + text(key)
        said += struct.pack("<B", _ADD) + text(key) + struct.pack("<q", dice.randrange(1000))
    return said


class Strangers:
    """`with Strangers(ports) as strangers:` come to each port again and again until the block ends.

    `sent` counts what came through, by kind, and `met` are the ports that they came to.
    """

    def __init__(self, ports: Callable[[], Iterable[Listening]], recorded: list[bytes]) -> None:
        """`ports` is asked before each round: while a run starts, processes open more of them."""
        self.sent: Counter[str] = Counter()
        self.met: set[Listening] = set()
        self.rounds = 0
        """Rounds in which each kind of message has come to each port."""
        self._ports = ports
        self._recorded = recorded
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
        while not self._over.wait(LOOK_S if self.rounds else 0.0):
            for port in self._ports():
                for kind, made in kinds.items():
                    if self._over.wait(0.002):
                        return
                    self._send(port, kind, made())
            self.rounds += 1

    def _send(self, port: Listening, kind: str, data: bytes) -> None:
        if port.kind == "udp":
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
                stranger.sendto(data[:1000], (port.address, port.port))
        else:
            try:
                stranger = socket.create_connection((port.address, port.port), timeout=5)
            except OSError:  # nobody listens there any more
                return
            with contextlib.suppress(OSError):
                stranger.sendall(data)
            if kind == "half a message" and self._open[port.port] < HALF_OPEN:
                self._open[port.port] += 1
                self._held.append(stranger)
            else:
                stranger.close()
        self.sent[kind] += 1
        self.met.add(port)
