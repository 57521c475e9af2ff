"""A rank in a process of its own, for the tests of the control plane: `start_peer` runs this file."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
from waiting import HANG_S, scaled

from slurm_rlhf.errors import RewardError, RoleDied
from slurm_rlhf.wire.auth import RunKeys
from slurm_rlhf.wire.client import ControlClient
from slurm_rlhf.wire.codec import decode
from slurm_rlhf.wire.handles import ControlServer
from slurm_rlhf.wire.messages import Request

INTERVAL, LIMIT = 0.2, round(scaled(2.0))


def start_peer(
    endpoint: str, key_file: Path, role: str, rank: int, world: int, limit: float = LIMIT, host: str = ""
) -> subprocess.Popen[bytes]:
    """The caller stops it with `stop_peer`. `host`: the node it says it is on; empty: this machine."""
    return _start(endpoint, str(key_file), role, str(rank), str(world), str(limit), host)


def start_conductor(key_file: Path) -> tuple[subprocess.Popen[bytes], str]:
    """A conductor's process and its endpoint; the caller stops it with `stop_peer`."""
    process = _start(str(key_file), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    return process, process.stdout.readline().decode().strip()


def _start(*args: str, **pipes: int) -> subprocess.Popen[bytes]:
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, __file__, *args], env=environment, **pipes)


def stop_peer(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def ask(server: ControlServer, role: str, rank: int, method: str, /, timeout_s: float, **args: Any) -> Future[Any]:
    """Call `method(**args)`; the Future's result is the reply as it was decoded."""
    return server.call(role, rank, method, args, timeout_s, decode)


def received(client: ControlClient) -> Request:
    request = client.receive(HANG_S)
    assert request is not None
    return request


def _answer(client: ControlClient, request: Request) -> None:
    client.phase, args = request.method, request.argument()
    match request.method:
        case "echo":
            request.reply(args)
        case "sleep":
            time.sleep(args["seconds"])
            request.reply("slept")
        case "compute":
            end = time.monotonic() + args["seconds"]
            while time.monotonic() < end:
                sum(range(100_000))
            request.reply("computed")
        case "double":
            request.reply({"array": args["array"] * 2})
        case "zeros":
            request.reply(np.zeros(args["bytes"], np.uint8))
        case "raise":
            raise RewardError("reward.py returned NaN at index 3") if args["user"] else KeyError("missing")
        case "unsendable":
            request.reply(object())
        case "announce":
            for number in range(args["times"]):
                client.event("progress", number=number)
            request.reply(None)
        case "tell":
            client.event(args["event"])
            request.reply(None)
        case "leave":
            request.reply("bye")
            client.close()


def _serve(endpoint: str, key_file: str, role: str, rank: str, world: str, limit: str, host: str) -> None:
    client = ControlClient(
        endpoint,
        RunKeys.load(key_file),
        role,
        int(rank),
        int(world),
        host=host or None,
        heartbeat_interval=INTERVAL,
        heartbeat_limit=float(limit),
    )
    while (request := client.receive()) is not None:
        try:
            _answer(client, request)
        except Exception as error:
            request.fail(error)


def _conduct(key_file: str) -> None:
    """For the tests that suspend or kill a conductor: prints its endpoint, then what rank 0 answers to each line."""
    with ControlServer(RunKeys.create(key_file), heartbeat_interval=INTERVAL, heartbeat_limit=LIMIT) as server:
        print(server.endpoint(), flush=True)
        server.wait_for("actor", 1, HANG_S)
        for line in sys.stdin:
            print(ask(server, "actor", 0, "echo", timeout_s=HANG_S, line=line.strip()).result(), flush=True)


if __name__ == "__main__":
    if len(sys.argv) == 2:
        _conduct(sys.argv[1])
        sys.exit(0)
    try:
        _serve(*sys.argv[1:])
    except RoleDied:
        sys.exit(3)
