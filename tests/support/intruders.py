"""Attacks on the control port of a run: bytes that are cut, repeated, made up, or signed with another key."""

from __future__ import annotations

import contextlib
import random
import socket
import tempfile
import threading
from pathlib import Path

from waiting import HANG_S

from slurm_rlhf.errors import SlurmRlhfError
from slurm_rlhf.wire.auth import RunKeys
from slurm_rlhf.wire.client import ControlClient

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01CURVE" + bytes(48)  # ZMTP 3.1, as a client of the run begins
ROUNDS = 20
STRANGER = ("reference", 77)
"""A role, and a number of ranks that it does not have."""


def attack(kind: str, endpoint: str, keys: Path, seed: int) -> None:
    """Attack the port at `endpoint`, `ROUNDS` times; `keys`: the file with the run's keys, for what is recorded."""
    dice = random.Random(f"{seed} {kind}")
    if kind == "forged":
        with tempfile.TemporaryDirectory() as place:
            _say_hello(endpoint, RunKeys.create(Path(place) / "keys.json"), *STRANGER, 1.0)
        return
    streams = [GREETING] if kind == "random" else record(endpoint, RunKeys.load(keys), *STRANGER)
    for _ in range(ROUNDS):
        stream = dice.choice(streams)
        if kind == "truncated":
            stream = stream[: dice.randrange(1, len(stream))]
        elif kind == "random":
            stream = stream[: dice.randrange(len(stream) + 1)] + dice.randbytes(300)
        send(endpoint, stream)


def _address(endpoint: str) -> tuple[str, int]:
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return host, int(port)


def send(endpoint: str, data: bytes) -> bool:
    """Send bytes over a connection of their own; the other side may close it before it has read everything.

    Returns False where nobody listens.
    """
    try:
        with socket.create_connection(_address(endpoint), timeout=HANG_S) as stranger:
            stranger.sendall(data)
    except ConnectionRefusedError:
        return False
    except OSError:
        pass
    return True


def _say_hello(endpoint: str, keys: RunKeys, role: str, world: int, wait_s: float) -> None:
    with ControlClient(endpoint, keys, role, world, world, heartbeat_interval=0.1, heartbeat_limit=20) as client:
        with contextlib.suppress(SlurmRlhfError):
            client.connect(wait_s)


def record(endpoint: str, keys: RunKeys, role: str, world: int) -> list[bytes]:
    """Return what a client with the run's keys sends over each of its connections, byte for byte.

    It introduces itself as the rank after the last of `world` ranks: it speaks to the conductor and changes nothing.
    """
    sent: list[bytearray] = []
    with socket.create_server(("127.0.0.1", 0)) as listener, contextlib.ExitStack() as stack:

        def forward(source: socket.socket, target: socket.socket, copy: bytearray) -> None:
            with contextlib.suppress(OSError):
                while data := source.recv(65536):
                    copy += data
                    target.sendall(data)

        listener.settimeout(5)

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    client = stack.enter_context(listener.accept()[0])
                    server = stack.enter_context(socket.create_connection(_address(endpoint), timeout=HANG_S))
                    sent.append(bytearray())
                    threading.Thread(target=forward, args=(client, server, sent[-1]), daemon=True).start()
                    threading.Thread(target=forward, args=(server, client, bytearray()), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        _say_hello(f"tcp://127.0.0.1:{listener.getsockname()[1]}", keys, role, world, 1.5)
    return [bytes(stream) for stream in sent if stream]
