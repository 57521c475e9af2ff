"""An engine's device memory: freed while other roles use the accelerator, allocated again before it generates."""

from __future__ import annotations

from typing import Protocol

from slurm_rlhf.errors import RunError
from slurm_rlhf.records import KV_CACHE, WEIGHTS, MemoryPart

PARTS = (WEIGHTS, KV_CACHE)
"""vLLM's tags for what an engine has in memory, in the order in which it is allocated again."""

_DISCARD = 2
"""vLLM's sleep level: the weights are not kept, because those of the next policy version take their place anyway."""


class SleepMode(Protocol):
    """Declares the part of vLLM's `LLMEngine` that is used here."""

    def sleep(self, level: int = ...) -> object: ...

    def wake_up(self, tags: list[str] | None = ...) -> object: ...


class DeviceMemory:
    """Frees and allocates the memory of one vLLM engine. On CPUs vLLM takes the same calls and keeps its memory."""

    def __init__(self, llm: SleepMode, share: float) -> None:
        """Watch `llm`, an engine with enable_sleep_mode; `share`: its gpu_memory_utilization."""
        self._llm = llm
        self._share = share
        self.missing: set[str] = set()

    def release(self) -> int:
        """See `Engine.sleep`."""
        before = _free_bytes()
        self.missing = set(PARTS)
        self._llm.sleep(level=_DISCARD)
        return max(0, _free_bytes() - before)

    def allocate(self, part: MemoryPart) -> None:
        """See `Engine.wake_up`."""
        if part not in self.missing:
            raise RunError(f"the engine has its {part} already; parts that it lacks: {sorted(self.missing)}")
        try:
            self._llm.wake_up(tags=[part])
        except Exception as error:
            raise RunError(
                f"the engine cannot allocate its {part} again: {error}. With train.colocate_all it needs "
                f"vllm.gpu_memory_utilization = {self._share:g} of the GPU beside what the other roles keep there: "
                f"lower it, or set ds.enable_sleep = true or a higher ds.zero_stage"
            ) from error
        self.missing.discard(part)

    def require(self, *parts: str) -> None:
        """Raise RunError unless the engine has these parts."""
        asleep = [part for part in parts if part in self.missing]
        if asleep:
            raise RunError(f"the engine is asleep: it has freed its {' and '.join(asleep)}, and wake_up comes first")


def _free_bytes() -> int:
    """Return the free bytes of the current GPU; 0 without one."""
    import torch

    return int(torch.cuda.mem_get_info()[0]) if torch.cuda.is_available() else 0
