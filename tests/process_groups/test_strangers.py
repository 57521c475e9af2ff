"""Another user of the node comes between the ranks of gloo groups: it is believed nothing, and no code of it runs."""

from __future__ import annotations

import ctypes
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gloo_relay
import pytest
import torch
from gloo_relay import FORGED
from torch.distributed import HashStore, Store, TCPStore, distributed_c10d
from waiting import HANG_S

from slurm_rlhf.errors import StrangerError
from slurm_rlhf.process_groups._torch import gloo_group, meet, prove_all

pytestmark = [pytest.mark.slow]


class Process:
    """One of the programs in `gloo_relay`."""

    def __init__(self, *words: str) -> None:
        command = [sys.executable, "-u", gloo_relay.__file__, *words]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, **pipes)

    def tell(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{text}\n".encode())
        self.process.stdin.flush()

    def answer(self) -> str:
        assert self.process.stdout is not None
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
def test_who_comes_between_two_ranks_is_found_out(kind: str, times: int, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    evidence = tmp_path / "code_of_a_stranger_ran"
    with ExitStack() as stack:
        ranks = [stack.enter_context(running(kind, str(rank))) for rank in range(2)]
        stranger = stack.enter_context(running("attack", str(evidence)))
        assert [rank.answer() for rank in ranks] == ["ready"] * 2
        for number in range(times):
            store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            stranger.tell(str(store.port))
            assert stranger.answer() == f"looking at {store.port}"
            for rank in ranks:
                rank.tell(json.dumps([store.port, f"secret {number}"]))
            assert stranger.answer() == "wrote"
            ranks[1].tell("go")
            came = [json.loads(rank.answer()) for rank in ranks]
            assert not evidence.exists()
            assert FORGED.decode() not in came
            assert "is by none of them: somebody else on the network" in "".join(came)


def test_a_group_that_is_formed_later_takes_no_stranger_for_a_rank() -> None:
    with running("later", "0") as first, running("later", "1") as second:
        assert first.answer() == second.answer() == "ready"
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank in (first, second):
            rank.tell(json.dumps([store.port, "secret"]))
        said = json.loads(first.answer()) + json.loads(second.answer())
        assert "of its process group knows no secret of this run" in said


@pytest.mark.parametrize("kind", ["a number for an answer", "echo", "a rank"])
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
        with pytest.raises(
            StrangerError, match="who connected to rank 0 as rank 1 of its process group knows no secret"
        ):
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
        with pytest.raises(StrangerError, match="what the ranks' store has under 'address' is by none of them"):
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
    """What a rank makes of an object that another one sends."""
    meet(HashStore(), 0, 1)  # guards the unpickler
    tensor, size = distributed_c10d._object_to_tensor(value, torch.device("cpu"), None)
    return distributed_c10d._tensor_to_object(tensor, size, None)


def test_a_pickle_runs_no_code() -> None:
    with pytest.raises(StrangerError, match=r"a rank was sent a pickle that wants builtins\.exec"):
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
