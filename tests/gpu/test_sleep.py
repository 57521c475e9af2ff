"""An engine's device memory, given up and taken back, on stand-ins for a GPU and for vLLM's engine."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from gpu_signatures import Stub
from gpu_standins import FakeCuda, fake_cuda

from slurm_rlhf.engine.vllm import DeviceMemory
from slurm_rlhf.errors import RunError
from slurm_rlhf.records import KV_CACHE, WEIGHTS


@pytest.fixture
def cuda():
    with fake_cuda(["GPU-a"], memory=1 << 20) as fake:
        yield fake


class Engine:
    """vLLM's LLMEngine, as far as sleep goes: half of a GPU is its."""

    def __init__(self) -> None:
        self.held = {part: torch.empty(1 << 18, dtype=torch.uint8, device="cuda") for part in (WEIGHTS, KV_CACHE)}

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        assert level == 2
        self.held.clear()

    def wake_up(self, tags: list[str] | None = None) -> bool:
        for tag in tags or ():
            self.held[tag] = torch.empty(1 << 18, dtype=torch.uint8, device="cuda")
        return len(self.held) == 2


def test_the_stand_in_takes_what_vllm_takes():
    """Read from vLLM's source: importing it takes seconds."""
    package = Path(importlib.util.find_spec("vllm").origin).parent
    real = Stub(package / "v1" / "engine" / "llm_engine.py", "LLMEngine").methods
    for name in ("sleep", "wake_up"):
        assert list(real[name][0].parameters) == list(Stub(Path(__file__), "Engine").methods[name][0].parameters)


def test_memory_is_freed_and_allocated_again(cuda: FakeCuda):
    memory = DeviceMemory(Engine(), 0.5)
    memory.require(WEIGHTS, KV_CACHE)
    assert memory.release() == 1 << 19
    with pytest.raises(RunError, match="has freed its weights and kv_cache"):
        memory.require(WEIGHTS, KV_CACHE)
    memory.allocate(WEIGHTS)
    with pytest.raises(RunError, match="has its weights already"):
        memory.allocate(WEIGHTS)
    others = torch.empty(3 << 18, dtype=torch.uint8, device="cuda")
    with pytest.raises(RunError, match=r"cannot allocate its kv_cache again: CUDA out of memory.*0.5 of the GPU"):
        memory.allocate(KV_CACHE)
    del others
    memory.allocate(KV_CACHE)
    memory.require(WEIGHTS, KV_CACHE)
