"""The control port in a flood of connections from strangers."""

from __future__ import annotations

import logging
import os
import resource
import socket as network
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import zmq
from control_peer import ask, received, start_peer, stop_peer
from waiting import HANG_S, until

from slurm_rlhf.errors import CallTimeout
from slurm_rlhf.observe.run_log import EventLog, WarningEvents, read_events
from slurm_rlhf.wire.auth import Authenticator, RunKeys
from slurm_rlhf.wire.client import ControlClient
from slurm_rlhf.wire.handles import ControlServer

LIMIT, STRANGERS = 1024, 1600


def lines(*words: str) -> subprocess.Popen[str]:
    """Run this file as a process that answers each line with one."""
    root, support = Path(__file__).resolve().parents[2], Path(__file__).resolve().parents[1] / "support"
    environment = {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{support}"}
    command = [sys.executable, __file__, *words]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def said(process: subprocess.Popen[str]) -> list[str]:
    return process.stdout.readline().split()


def conduct(key_file: str, events: str) -> None:
    """Call the rank that a line names, and open a file; answer with what came, and with how many were refused."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT, LIMIT))
    logger, log = logging.getLogger("slurm_rlhf"), EventLog(Path(events))
    logger.addHandler(WarningEvents(lambda kind, text: log.append(kind, 0, text)))
    with ControlServer(RunKeys.create(key_file)) as server:
        print(server.endpoint(), flush=True)
        for line in sys.stdin:
            rank = int(line)
            server.wait_for("actor", rank + 1, HANG_S)
            reply = ask(server, "actor", rank, "echo", timeout_s=HANG_S).result()
            with open(os.devnull):
                print(reply, server.auth.refused, flush=True)


def crowd(endpoint: str) -> None:
    """Open connections, and keep them."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    host, port = endpoint.removeprefix("tcp://").split(":")
    kept = [network.create_connection((host, int(port))) for _ in range(STRANGERS)]
    print(len(kept), flush=True)
    sys.stdin.read()


def close_unread(key_file: str) -> None:
    """Close behind a crowd whose coming and going nobody has read: 2,000 news are kept."""
    context: zmq.Context[Any] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    authenticator = Authenticator(context, router, RunKeys.create(key_file))
    port = router.bind_to_random_port("tcp://127.0.0.1")
    for _ in range(2 * STRANGERS):
        with network.socket() as stranger:
            stranger.setblocking(False)  # ZeroMQ's thread may not accept it any more
            stranger.connect_ex(("127.0.0.1", port))
    authenticator.close()
    router.close(linger=0)
    context.term()
    print("closed")


def rank(endpoint: str, keys: RunKeys, number: int) -> ControlClient:
    client = ControlClient(endpoint, keys, "actor", number, 2)
    client.connect(HANG_S)
    return client


def answered(conductor: subprocess.Popen[str], client: ControlClient, number: int) -> list[str]:
    conductor.stdin.write(f"{number}\n")
    conductor.stdin.flush()
    received(client).reply("fine")
    return said(conductor)


@pytest.mark.slow
def test_more_strangers_than_descriptors_end_nothing(tmp_path: Path) -> None:
    """Ranks that are there are called, ranks that come are let in, and files can be opened all the while."""
    events = tmp_path / "events.jsonl"
    conductor = lines("conduct", str(tmp_path / "keys.json"), str(events))
    try:
        (endpoint,) = said(conductor)
        keys = RunKeys.load(tmp_path / "keys.json")
        with rank(endpoint, keys, 0) as first:
            assert answered(conductor, first, 0) == ["fine", "0"]
            strangers = lines("crowd", endpoint)
            try:
                assert said(strangers) == [str(STRANGERS)]
                with rank(endpoint, keys, 1) as second:
                    assert answered(conductor, second, 1)[0] == "fine"
                    word, refused = answered(conductor, first, 0)
                assert word == "fine"
                assert int(refused) >= STRANGERS - LIMIT // 4
            finally:
                strangers.kill()
                strangers.communicate()
            assert answered(conductor, first, 0)[0] == "fine"
            assert first.conductor_lost == ""
    finally:
        conductor.kill()
        conductor.communicate()
    assert any("without the run's key" in event.text for event in read_events(events))


def test_admitted_ranks_that_have_said_nothing_yet_are_not_ended_however_many_they_are(tmp_path: Path) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        authenticator = Authenticator(context, router, RunKeys.create(tmp_path / "keys.json"))
        silent = dict.fromkeys(range(10**6, 10**6 + authenticator._most + 1))
        authenticator._unheard = dict(silent)
        authenticator.answer()
        assert authenticator._unheard == silent
        authenticator.close()


def test_it_closes_with_more_news_of_connections_than_zeromq_keeps(tmp_path: Path) -> None:
    """In a process of its own: where it waits for ZeroMQ's lock, it holds Python's."""
    process = lines("close_unread", str(tmp_path / "keys.json"))
    try:
        assert process.communicate(timeout=HANG_S)[0] == "closed\n"
    finally:
        process.kill()


def test_ranks_that_find_no_descriptor_are_shown_which_limit_it_was(tmp_path: Path) -> None:
    keys, (soft, hard) = RunKeys.create(tmp_path / "keys.json"), resource.getrlimit(resource.RLIMIT_NOFILE)
    with ControlServer(keys) as server:
        comes = start_peer(server.endpoint(), tmp_path / "keys.json", "actor", 0, 1)
        try:
            os.close(free := os.dup(0))  # the lowest number that is free
            resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
            until(lambda: server.auth.obstacle)
            with pytest.raises(CallTimeout, match=r"missing: 0; .*may have \d+ open, .*`ulimit -n`"):
                server.wait_for("actor", 1, 0)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            stop_peer(comes)


if __name__ == "__main__":
    {"crowd": crowd, "conduct": conduct, "close_unread": close_unread}[sys.argv[1]](*sys.argv[2:])
