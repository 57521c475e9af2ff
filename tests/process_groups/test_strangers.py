"""Another user of the node comes between the ranks of gloo groups: it is believed nothing, and no code of it runs."""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import os
import re
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore, Store, TCPStore, distributed_c10d
from waiting import HANG_S

from slurm_rlhf.errors import StrangerError
from slurm_rlhf.process_groups import _torch
from slurm_rlhf.process_groups._torch import gloo_group, meet, prove_all

LIMIT_S = 20.0
WEIGHTS = b"weights!" * 8
ADDRESS = re.compile(rb"\x02\x00(..)\x7f\x00\x00\x01", re.DOTALL)


class Stranger(threading.Thread):
    """Writes an address of its own in place of each that a rank has written to a store, as any user of the node can."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self._store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.wrote, self.over = threading.Event(), threading.Event()

    def run(self) -> None:
        mine = b"\x02\x00" + struct.pack(">H", self._listener.getsockname()[1]) + b"\x7f\x00\x00\x01"
        with self._listener, contextlib.suppress(RuntimeError):
            while not self.over.wait(0.001):
                for key in self._store.list_keys():
                    value = self._store.get(key)
                    if ADDRESS.search(value) and mine not in value:
                        group = key.lstrip("/").rpartition("/")[0]
                        for rank in range(2):
                            self._store.set(f"{group}/{rank}", ADDRESS.sub(lambda _: mine, value))
                        self.wrote.set()


@contextmanager
def attacked(port: int) -> Iterator[Stranger]:
    """A store whose addresses a stranger exchanges."""
    stranger = Stranger(port)
    stranger.start()
    try:
        yield stranger
    finally:
        stranger.over.set()
        stranger.join()


class Process:
    """A rank: this file as a program."""

    def __init__(self, *words: str) -> None:
        command = [sys.executable, "-u", __file__, *words]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, **pipes)

    def tell(self, text: str) -> None:
        self.process.stdin.write(f"{text}\n".encode())
        self.process.stdin.flush()

    def answer(self) -> str:
        return self.process.stdout.readline().decode().strip()


@contextmanager
def running(*words: str) -> Iterator[Process]:
    made = Process(*words)
    try:
        yield made
    finally:
        made.process.kill()
        made.process.communicate()


@pytest.mark.parametrize("kind", ["engine", "role", "sync"])
@pytest.mark.parametrize("times", [2, pytest.param(20, marks=pytest.mark.full)])
@pytest.mark.slow
def test_who_comes_between_two_ranks_is_found_out(kind: str, times: int) -> None:
    with ExitStack() as stack:
        ranks = [stack.enter_context(running(kind, str(rank))) for rank in range(2)]
        assert [rank.answer() for rank in ranks] == ["ready"] * 2
        for number in range(times):
            store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            with attacked(store.port) as stranger:
                for rank in ranks:
                    rank.tell(json.dumps([store.port, f"secret {number}"]))
                assert stranger.wrote.wait(HANG_S)
                ranks[1].tell("go")
                came = [json.loads(rank.answer()) for rank in ranks]
            assert "was written by none of them: somebody else on the network" in "".join(came)


@pytest.mark.slow
def test_a_group_that_is_formed_later_takes_no_stranger_for_a_rank() -> None:
    with running("later", "0") as first, running("later", "1") as second:
        assert first.answer() == second.answer() == "ready"
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank in (first, second):
            rank.tell(json.dumps([store.port, "secret"]))
        said = json.loads(first.answer()) + json.loads(second.answer())
        assert "of its process group does not know the secret of this run" in said


@pytest.mark.parametrize("kind", ["a number for an answer", "echo", "a rank"])
@pytest.mark.slow
def test_who_proves_nothing_ends_the_rank(kind: str) -> None:
    store = HashStore()
    with ThreadPoolExecutor(2) as threads:
        group, other = threads.map(lambda rank: gloo_group(store, rank, 2, "127.0.0.1", HANG_S, lazy=True), range(2))
        proving = threads.submit(prove_all, group, store, 0, 2)
        if kind == "a rank":
            prove_all(other, store, 1, 2)
            proving.result(HANG_S)
            return
        for _ in range(2):
            heard, said = torch.zeros(32, dtype=torch.uint8), torch.arange(32, dtype=torch.uint8)
            taken = other.recv([heard], 0, 0)
            taken.wait()
            other.send([heard if kind == "echo" else said], 0, 0).wait()
        with pytest.raises(StrangerError, match="connected to rank 0 as rank 1 of its process group does not know"):
            proving.result(HANG_S)


def met(store: Store, value: str) -> tuple[Store, Store]:
    """The stores of two ranks that have met; the first has set "address"."""
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(lambda rank: meet(store, rank, 2), range(2))
    first.set("address", value)
    return first, second


def test_only_what_ranks_of_this_meeting_have_written_is_believed() -> None:
    earlier, inner = HashStore(), HashStore()
    met(earlier, "old")
    first, second = met(inner, "new")
    assert second.get("address") == b"new"
    assert second.compare_set("address", "new", "newer") == b"newer" == first.get("address")
    assert second.compare_set("address", "other", "newest") == b"newer"
    true = inner.get("address")
    for forged in (b"new", b"", true[:-1] + b"!", earlier.get("address")):
        inner.set("address", forged)
        with pytest.raises(StrangerError, match="'address' in the ranks' store was written by none of them"):
            second.get("address")
    inner.set("another key", true)
    with pytest.raises(StrangerError):
        second.get("another key")


class Evil:
    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit('code of a stranger runs')",)


class Hidden:
    """A tensor's content, as it is pickled, that is none."""

    def __reduce__(self) -> Any:
        evil = io.BytesIO()
        torch.save(Evil(), evil)
        return torch.storage._load_from_bytes, (evil.getvalue(),)


def sent(value: Any) -> Any:
    """Encode an object as one rank sends it, and decode it as another receives it."""
    meet(HashStore(), 0, 1)  # guards the unpickler
    tensor, size = distributed_c10d._object_to_tensor(value, torch.device("cpu"), None)
    return distributed_c10d._tensor_to_object(tensor, size, None)


def test_a_pickle_runs_no_code() -> None:
    with pytest.raises(StrangerError, match=r"a rank was sent a pickle that asks for builtins\.exec"):
        sent([1, Evil()])
    with pytest.raises(Exception, match="Weights only load failed"):
        sent(Hidden())


@pytest.mark.engine
@pytest.mark.usefixtures("own_environment")
def test_what_engines_send_is_admitted(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.device_communicators.shm_broadcast import Handle

    plain = ["psm_1", 2, None, b"x", ([1, 2], 3.0), {"a": True}]
    assert sent(plain) == plain
    handle = Handle([1], (1, 2, 3, "psm"), "ipc://x", None, None, False, (1, 2, 3, "y"))
    assert sent(handle) == handle
    memory = torch.arange(64, dtype=torch.uint8)  # a handle of vLLM's own all-reduce
    assert torch.equal(sent([None, memory])[1], memory)
    fields = {"_fields_": (("internal", ctypes.c_byte * 128),), "__module__": "flashinfer.comm.cuda_ipc"}
    memory_handle = type("cudaIpcMemHandle_t", (ctypes.Structure,), fields)
    for name in ("flashinfer", "flashinfer.comm", "flashinfer.comm.cuda_ipc"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(cudaIpcMemHandle_t=memory_handle))
    shared: Any = memory_handle()
    shared.internal[5] = 7
    assert bytes(sent(shared)) == bytes(shared)


# --- the ranks: this file as a program, `KIND RANK` ------------------------------------------------------------------


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
    from slurm_rlhf.weights.rendezvous import Membership

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
    name = "_all_at" if kind == "sync" else "meet"
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
    be_rank(sys.argv[1], int(sys.argv[2]))
