"""Silence and its end: a peer that falls silent is lost in time, one that only could not listen is not."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from control_peer import INTERVAL, LIMIT, ask, received, start_conductor, start_peer, stop_peer
from programs import completed
from waiting import HANG_S, until

from slurm_rlhf.errors import CallTimeout, RoleDied
from slurm_rlhf.wire.auth import RunKeys
from slurm_rlhf.wire.client import THREAD_FAILED, ControlClient
from slurm_rlhf.wire.codec import encode
from slurm_rlhf.wire.handles import ControlServer
from slurm_rlhf.wire.io_loop import IoLoop
from slurm_rlhf.wire.io_thread import ListeningClock, end_context
from slurm_rlhf.wire.messages import Envelope, Peer

TIMES = {"heartbeat_interval": INTERVAL, "heartbeat_limit": LIMIT}


def test_a_thread_that_was_woken_sleeps_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread has a round for each beat, and would spin in between if nobody took back what woke it."""
    called: list[str] = []

    def counted(name: str) -> None:
        original = getattr(IoLoop, name)
        monkeypatch.setattr(IoLoop, name, lambda loop: called.append(name) or original(loop))

    counted("_round")
    counted("_beat")
    server = ControlServer(RunKeys.create(tmp_path / "keys.json"), heartbeat_interval=0.02, heartbeat_limit=HANG_S)
    try:
        server._wake()
        until(lambda: called.count("_beat") > 5, "beats after it was woken")
    finally:
        server.close()
    assert called.count("_round") < 4 * called.count("_beat") + 10


class Run:
    """A conductor's end that notes who was lost, and started processes."""

    def __init__(self, directory: Path) -> None:
        self.key_file = directory / "keys.json"
        self.keys = RunKeys.create(self.key_file)
        self.lost: list[Peer] = []
        self.noticed = threading.Event()
        self.server = ControlServer(self.keys, on_lost=self._note, **TIMES)
        self.processes: list[subprocess.Popen[bytes]] = []

    def _note(self, peer: Peer) -> None:
        self.lost.append(peer)
        self.noticed.set()

    def start(self, rank: int, world: int) -> subprocess.Popen[bytes]:
        process = start_peer(self.server.endpoint(), self.key_file, "actor", rank, world)
        self.processes.append(process)
        return process


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path)
    try:
        yield made
    finally:
        made.server.close()
        for process in made.processes:
            stop_peer(process)


@pytest.mark.slow
def test_a_role_that_starts_again_takes_its_new_ranks_and_refuses_the_old(run: Run) -> None:
    """A role that has failed for good works again; its old rank is asked to end, and a late old one is refused."""
    old = run.start(0, 1)
    run.server.wait_for("actor", 1, HANG_S)
    call = ask(run.server, "actor", 0, "sleep", timeout_s=HANG_S, seconds=60)
    run.server.fail_role("actor", RoleDied("gone"))
    assert isinstance(call.exception(HANG_S), RoleDied)
    run.server.dismiss("actor", "it starts again")
    assert run.server.starts("actor") == 1
    assert run.server.peers("actor") == []
    assert isinstance(ask(run.server, "actor", 0, "echo", timeout_s=HANG_S).exception(HANG_S), RoleDied)
    old.wait(HANG_S)
    with (
        ControlClient(run.server.endpoint(), run.keys, "actor", 0, 1, **TIMES) as late,
        ControlClient(run.server.endpoint(), run.keys, "actor", 0, 1, start=1, **TIMES) as fresh,
    ):
        fresh.connect(HANG_S)
        assert [peer.lost for peer in run.server.wait_for("actor", 1, HANG_S)] == [""]
        with pytest.raises(CallTimeout, match="start 1 of actor has this rank"):
            late.connect(3 * INTERVAL)
        run.server.fail_role("actor", RoleDied("broken"))
        run.server.revive("actor")
        answer = ask(run.server, "actor", 0, "echo", timeout_s=HANG_S)
        received(fresh).reply("here")
        assert answer.result(HANG_S) == "here"
    assert run.lost == []


@pytest.mark.slow
def test_a_killed_rank_is_lost_within_the_limit_and_can_be_replaced(run: Run) -> None:
    processes = [run.start(rank, 2) for rank in range(2)]
    run.server.wait_for("actor", 2, HANG_S)
    futures = [ask(run.server, "actor", rank, "sleep", timeout_s=HANG_S, seconds=2 * LIMIT) for rank in range(2)]
    until(lambda: all(peer.phase == "sleep" for peer in run.server.peers("actor")))
    processes[1].send_signal(signal.SIGKILL)
    silent = f"it was not heard from for {LIMIT} s"
    with pytest.raises(RoleDied, match=rf"actor rank 1 on .* in sleep: {silent}, last phase 'sle"):
        futures[1].result(HANG_S)
    assert run.noticed.wait(HANG_S)
    assert [(peer.rank, peer.pid) for peer in run.lost] == [(1, processes[1].pid)]
    with pytest.raises(RoleDied, match=r"actor rank 1 .* is lost"):
        ask(run.server, "actor", 1, "echo", timeout_s=HANG_S).result(HANG_S)
    with pytest.raises(RoleDied, match=r"actor rank 1 .* is lost"):
        run.server.wait_for("actor", 2, HANG_S)
    assert futures[0].result(HANG_S) == "slept"
    replacement = run.start(1, 2)
    until(lambda: not run.server.peers("actor")[1].lost, "the new rank")
    assert ask(run.server, "actor", 1, "echo", timeout_s=HANG_S, a=1).result(HANG_S) == {"a": 1}
    assert run.server.peers("actor")[1].pid == replacement.pid


def test_an_end_of_zeromq_that_does_not_come_is_not_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    """A socket that is left open keeps the context from ending."""
    context: zmq.Context[Any] = zmq.Context()
    left = context.socket(zmq.DEALER)
    end_context(context, 0.2)
    assert "did not close its connections in 0.2 s" in caplog.text
    left.close()
    caplog.clear()
    end_context(zmq.Context())
    assert not caplog.text


@pytest.mark.slow
def test_a_stopped_rank_is_lost_and_ends_when_it_wakes(run: Run) -> None:
    process = run.start(0, 1)
    run.server.wait_for("actor", 1, HANG_S)
    process.send_signal(signal.SIGSTOP)
    assert run.noticed.wait(HANG_S)
    process.send_signal(signal.SIGCONT)
    assert process.wait(HANG_S) == 3


@pytest.mark.slow
def test_a_killed_conductor_is_noticed_by_the_rank(tmp_path: Path) -> None:
    conductor, endpoint = start_conductor(tmp_path / "keys.json")
    reasons: list[str] = []
    try:
        keys = RunKeys.load(tmp_path / "keys.json")
        with ControlClient(endpoint, keys, "actor", 0, 1, on_conductor_lost=reasons.append, **TIMES) as client:
            client.connect(HANG_S)
            conductor.kill()
            silent = f"it was not heard from for {LIMIT} s"
            with pytest.raises(RoleDied, match=f"conductor at {endpoint} is lost: {silent}"):
                client.receive()
            assert reasons == [silent]
    finally:
        stop_peer(conductor)


@pytest.mark.slow
def test_a_suspended_run_goes_on_where_it_was(tmp_path: Path) -> None:
    """`scontrol suspend` stops all processes of a job, and everybody has been silent when it resumes."""
    conductor, endpoint = start_conductor(tmp_path / "keys.json")
    rank = start_peer(endpoint, tmp_path / "keys.json", "actor", 0, 1)
    try:

        def answer(line: bytes) -> bytes:
            conductor.stdin.write(line + b"\n")
            conductor.stdin.flush()
            return conductor.stdout.readline().strip()

        assert answer(b"before") == b"{'line': 'before'}"
        for process in (conductor, rank):
            process.send_signal(signal.SIGSTOP)
        time.sleep(LIMIT + 4 * INTERVAL)
        for process in (conductor, rank):
            process.send_signal(signal.SIGCONT)
        assert answer(b"after") == b"{'line': 'after'}"
        time.sleep(3 * INTERVAL)
        assert answer(b"later") == b"{'line': 'later'}"
    finally:
        stop_peer(rank)
        stop_peer(conductor)


def test_the_clock_leaves_out_what_a_round_took_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    real = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: real[0])
    clock = ListeningClock(longest_round=5.0)
    start = clock.now()
    for step, elapsed in ((4.0, 4.0), (5.0, 9.0), (1000.0, 14.0), (1.0, 15.0)):
        real[0] += step
        clock.tick()
        assert clock.now() - start == pytest.approx(elapsed)
    assert clock.absence_s(within_s=2.0) == pytest.approx(1000.0)
    assert clock.absence_s(within_s=1.0) == 0.0  # the absence ended before
    real[0] += 30.0
    assert clock.absence_s(within_s=1.0) == pytest.approx(30.0)  # this absence lasts


class Proxy:
    """Passes TCP on between a rank and the conductor, until it is asked to cut."""

    def __init__(self, target: tuple[str, int]) -> None:
        self.target = target
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self.listener.getsockname()[1]}"
        self.open: list[socket.socket] = []
        self.connections = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Resets all connections; new ones are accepted."""
        for end in self.open:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self.open.clear()

    def _accept(self) -> None:
        while True:
            near, _ = self.listener.accept()
            far = socket.create_connection(self.target)
            self.connections += 1
            self.open += [near, far]
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._pass_on, args=(source, sink), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while content := source.recv(65536):
                sink.sendall(content)
            sink.shutdown(socket.SHUT_RDWR)


@pytest.mark.slow
def test_a_broken_connection_between_messages_does_no_harm(run: Run) -> None:
    host, port = run.server.endpoint().removeprefix("tcp://").split(":")
    proxy = Proxy((host, int(port)))
    with ControlClient(proxy.endpoint, run.keys, "actor", 0, 1, **TIMES) as client:
        client.connect(HANG_S)
        for count in range(1, 4):
            future = ask(run.server, "actor", 0, "echo", timeout_s=HANG_S)
            received(client).reply(count)
            assert future.result(HANG_S) == count
            time.sleep(2 * INTERVAL)
            # The next call is made while there is no connection: it waits for a new one.
            proxy.cut()
            time.sleep(0.05)
        assert proxy.connections >= 2 * 3
    assert run.lost == []


def insider(context: zmq.Context[Any], run: Run) -> zmq.Socket[Any]:
    dealer = context.socket(zmq.DEALER)
    dealer.curve_serverkey = run.keys.server_public.encode()
    dealer.curve_publickey = run.keys.client_public.encode()
    dealer.curve_secretkey = run.keys.client_secret.encode()
    dealer.connect(run.server.endpoint())
    hello = {"role": "actor", "rank": 0, "world": 1, "host": "node09", "pid": 1, "start": 0}
    dealer.send_multipart([Envelope("hello", 0).pack(), *encode(hello)])
    run.server.wait_for("actor", 1, HANG_S)
    return dealer


@pytest.mark.parametrize(
    "later", [Envelope("event", 3), Envelope("beat", 2), Envelope("reply", 3, 1)], ids=lambda envelope: envelope.kind
)
def test_lost_messages_fail_the_rank_at_once(run: Run, later: Envelope) -> None:
    """A reply that went down with a connection must not be waited for until its deadline."""
    with zmq.Context() as context, insider(context, run) as dealer:
        future = ask(run.server, "actor", 0, "train_step", timeout_s=HANG_S)
        dealer.send_multipart([Envelope("event", 1, name="n").pack(), *encode({})])
        dealer.send_multipart([later.pack(), *encode({})])
        with pytest.raises(RoleDied, match=r"messages 2 to \d were lost with its connection"):
            future.result(HANG_S)
        assert run.noticed.wait(HANG_S)
        dealer.linger = 0


def test_a_process_that_fails_without_closing_its_client_ends(run: Run) -> None:
    code = (
        "import sys, numpy; from slurm_rlhf.wire.client import ControlClient\n"
        "from slurm_rlhf.wire.auth import RunKeys\n"
        "client = ControlClient(sys.argv[1], RunKeys.load(sys.argv[2]), 'actor', 0, 1)\n"
        "client.connect(float(sys.argv[3]))\n"
        "client.event('big', array=numpy.zeros(20_000_000)); raise SystemExit(7)"
    )
    words = [sys.executable, "-c", code, run.server.endpoint(), str(run.key_file), str(HANG_S)]
    assert completed(words).returncode == 7


IDLE = """
import resource, sys, time
from slurm_rlhf.wire.auth import RunKeys
from slurm_rlhf.wire.client import ControlClient
from slurm_rlhf.wire.handles import ControlServer

keys = RunKeys.create(sys.argv[1])
with ControlServer(keys) as server:
    clients = [ControlClient(server.endpoint(), keys, "actor", rank, 12) for rank in range(12)]
    server.wait_for("actor", 12, float(sys.argv[2]))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
    time.sleep(3.0)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - before)
    for client in clients:
        client.close()
"""


@pytest.mark.slow
def test_idle_ends_cost_next_to_nothing(tmp_path: Path) -> None:
    """A conductor's end and 12 ranks have the default heartbeat, in a process that has nothing else to do."""
    command = [sys.executable, "-c", IDLE, str(tmp_path / "keys.json"), str(HANG_S)]
    done = completed(command, check=True)
    assert int(done.stdout) < 13 * 3 * 50  # a thread that asks every 10 ms is woken a hundred times in a second


MEMORYLESS = """
import sys, time
from pathlib import Path
from slurm_rlhf.wire import client
from slurm_rlhf.wire.auth import RunKeys
from slurm_rlhf.ranks.rank_process import _leave

def fail(*_):
    raise MemoryError

keys = RunKeys.create(Path(sys.argv[1]))
if sys.argv[2] == "silent":
    client.log.exception = sys.stderr.write = fail
client.ControlClient("tcp://127.0.0.1:1", keys, "actor", 0, 1, on_beat=fail, on_conductor_lost=_leave)
time.sleep(float(sys.argv[3]))
"""


@pytest.mark.parametrize("how", ["aloud", "silent"])
def test_a_rank_without_memory_for_its_heartbeats_ends(tmp_path: Path, how: str) -> None:
    """Memory ends as under `ulimit -v`: a process that lived on would be said to hold the interpreter's lock."""
    words = [sys.executable, "-c", MEMORYLESS, str(tmp_path / "keys"), how, str(HANG_S)]
    done = completed(words)
    assert done.returncode == 1
    if how == "aloud":
        assert done.stderr.splitlines()[-2:] == ["MemoryError", THREAD_FAILED]
