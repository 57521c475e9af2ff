"""The stand-ins are as strict as they say: what is wrong on a GPU fails here, too."""

from __future__ import annotations

import os
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import pytest
import torch
from gpu_ipc import Ledger
from gpu_signatures import Mismatch
from gpu_standins import FakeCuda, NoStandIn, check_signature, fake_cuda
from gpu_streams import StreamRace
from torch.distributed import HashStore


@pytest.fixture
def cuda():
    with fake_cuda(["GPU-a", "GPU-b"], memory=1 << 20) as fake:
        yield fake


def test_what_cuda_refuses(cuda: FakeCuda):
    here, there = torch.ones(2), torch.ones(2, device="cuda")
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        here + there
    with pytest.raises(RuntimeError, match="same device"):
        torch.cat([there, torch.ones(2, device="cuda:1")])
    with pytest.raises(TypeError, match="can't convert cuda:0 device type tensor to numpy"):
        there.numpy()
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.ones(2, device="cuda:2")
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(cuda.memory.total + 1, dtype=torch.uint8, device="cuda")
    assert (there + torch.tensor(1.0)).is_cuda, "a number may come from the CPU"


def test_an_unknown_function_of_torch_cuda_fails_loudly(cuda: FakeCuda):
    with pytest.raises(NoStandIn, match=r"torch.cuda.memory_snapshot has no stand-in"):
        torch.cuda.memory_snapshot()
    with pytest.raises(AttributeError):
        torch.cuda.syncronize()
    with pytest.raises(TypeError):
        torch.cuda.synchronize(0, 1)


def test_streams_have_to_wait(cuda: FakeCuda):
    side = torch.cuda.Stream()
    data = torch.zeros(4, device="cuda")
    with torch.cuda.stream(side):
        with pytest.raises(StreamRace, match="does not wait"):
            data.add_(1)
        side.wait_stream(torch.cuda.default_stream())
        data.add_(1)
    with pytest.raises(StreamRace):
        data.clone()
    torch.cuda.current_stream().wait_event(side.record_event())
    assert data.clone().is_cuda


def test_memory_that_is_freed_is_not_handed_out_under_a_stream_that_uses_it(cuda: FakeCuda):
    side, here = torch.cuda.Stream(), torch.cuda.current_stream()

    def use(recorded: bool) -> None:
        with torch.cuda.stream(side):
            data = torch.zeros(4, device="cuda")
        here.wait_stream(side)
        data.clone()
        if recorded:
            data.record_stream(here)

    use(recorded=False)
    with torch.cuda.stream(side), pytest.raises(StreamRace, match="freed without record_stream"):
        torch.zeros(4, device="cuda")
    side.wait_stream(here)
    use(recorded=True)
    use(recorded=False)
    side.wait_stream(here)
    with torch.cuda.stream(side):
        torch.zeros(4, device="cuda")


def test_an_event_that_was_never_recorded_says_nothing(cuda: FakeCuda):
    for ask in ("query", "synchronize", "wait"):
        with pytest.raises(StreamRace, match="never recorded"):
            getattr(torch.cuda.Event(), ask)()
    assert torch.cuda.current_stream().record_event().query()


def test_what_the_host_of_a_process_does_not_know_to_be_over_is_not_for_others():
    descriptor = os.memfd_create("ledger")
    mine, theirs = Ledger(descriptor, 1), Ledger(os.dup(descriptor), 2)
    assert mine.enter(0, 8, "writes", (0, 1)) == ""
    assert theirs.enter(0, 4, "reads", (0, 1)) == "process 1 still writes"
    assert theirs.enter(8, 12, "reads", (0, 1)) == ""
    mine.strike({0: 0})
    assert theirs.enter(4, 8, "reads", (0, 2)) == "process 1 still writes"
    mine.strike({0: 1})
    assert theirs.enter(4, 8, "reads", (0, 2)) == ""
    assert mine.enter(6, 7, "writes", (0, 2)) == "process 2 still reads"
    assert mine.enter(6, 7, "reads", (0, 2)) == ""
    theirs.strike({0: 2})
    assert mine.enter(6, 7, "writes", (0, 3)) == ""
    for ledger in (mine, theirs):
        ledger.close()


class Real:
    """A library's class."""

    def __init__(self, model: str, seed: int = 0) -> None: ...

    def step(self, tokens: list[int], *, tags: list[str] | None = None) -> int: ...


@pytest.mark.parametrize(
    ("init", "step", "right"),
    [
        (lambda self, model: None, lambda self, tokens: 0, True),
        (lambda self, model: None, lambda self, ids: 0, False),
        (lambda self, model: None, lambda self, *args: 0, False),
        (lambda self, model: None, lambda self, tokens=None: 0, False),
        (lambda self: None, lambda self, tokens: 0, False),
    ],
    ids=["right", "renamed", "swallows", "lenient", "forgets"],
)
def test_a_broken_signature_is_caught(init: Any, step: Any, right: bool) -> None:
    """The honesty of the check itself."""
    with nullcontext() if right else pytest.raises(Mismatch):
        check_signature(Real, type("Fake", (), {"__init__": init, "step": step}))
    with pytest.raises(Mismatch, match="has no advance"):
        check_signature(Real, type("Invents", (), {"__init__": init, "advance": step}))


def test_a_stand_in_that_torch_would_refuse_is_caught_when_it_is_installed(monkeypatch: pytest.MonkeyPatch):
    """torch changes, or the stand-in is wrong: the same test that uses it fails."""
    from gpu_cuda import Cuda

    monkeypatch.setattr(Cuda, "synchronize", lambda self, device=None, stream=None: None)
    with pytest.raises(Mismatch, match=r"torch.cuda.synchronize: the stand-in takes 'stream'"):
        FakeCuda().install()
    monkeypatch.setattr(Cuda, "synchronize", lambda self, device=None: None)
    monkeypatch.setattr(Cuda, "flush", lambda self: None, raising=False)
    with pytest.raises(AssertionError, match=r"torch\.cuda has no flush"):
        FakeCuda().install()


def test_a_bare_nccl_group_takes_what_its_bindings_take(cuda: FakeCuda):
    """Defect 1: `_start_coalescing` of a Backend has no argument, unlike that of a ProcessGroup."""
    kind = torch.distributed.ProcessGroupNCCL
    options = kind.Options()
    options._timeout = timedelta(seconds=5)
    with pytest.raises(AttributeError):
        options.timeout_s = 5
    with pytest.raises(TypeError):
        kind(HashStore(), 0, 1)
    group = kind(HashStore(), 0, 1, options)
    with pytest.raises(TypeError, match="incompatible function arguments"):
        group._start_coalescing(torch.device("cuda", 0))
    with pytest.raises(TypeError):
        group.allreduce()
    with pytest.raises(AttributeError, match="no attribute 'all_to_all_single'"):
        group.all_to_all_single([])
    with pytest.raises(ValueError, match="must be CUDA"):
        group.allreduce([torch.zeros(1)])
    assert not group._is_initialized()
    ones = torch.ones(2, device="cuda")
    with torch.cuda.device(1), pytest.raises(AssertionError, match="GPU is 1, and the tensor is on cuda:0"):
        group.allreduce([ones])
    work = group.allreduce([ones])
    assert work.wait()
    assert ones.tolist() == [1.0, 1.0]
    assert group._is_initialized()
    with pytest.raises(AttributeError):
        work.is_done()
    group.abort()
    with pytest.raises(RuntimeError, match="aborted"):
        group.allreduce([ones])
