"""The memory of a vLLM engine that sleeps and wakes."""

from __future__ import annotations

from typing import Any

from slurm_rlhf.engine.engine import Readiness
from slurm_rlhf.errors import RunError
from slurm_rlhf.records import MemoryPart

KEEP, DISCARD = 1, 2
"""vLLM's sleep levels: the weights are kept in host memory, because an update brings adapters alone; or they are not,
because those of the next policy version take their place."""


class DeviceMemory(Readiness):
    """Frees and allocates the memory of one vLLM engine. On CPUs vLLM takes the same calls and keeps its memory."""

    def __init__(self, llm: Any, share: float, number: int = 0, level: int = DISCARD) -> None:
        """Watch `llm`, of engine `number` with enable_sleep_mode; `share`: its gpu_memory_utilization."""
        super().__init__(number)
        self._llm = llm
        self._share = share
        self._level = level

    def release(self) -> int:
        """See `Engine.sleep`."""
        before = _free_bytes()
        self.slept()
        self._llm.sleep(level=self._level)
        return max(0, _free_bytes() - before)

    def allocate(self, part: MemoryPart) -> None:
        """See `Engine.wake`."""
        self.wakes(part)
        try:
            self._llm.wake_up(tags=[part])
        except Exception as error:
            raise RunError(
                f"the engine cannot allocate its {part} again: {error}. With train.colocate_all it needs "
                f"vllm.gpu_memory_utilization = {self._share:g} of the GPU, next to all that other roles keep there: "
                f"lower it, or set ds.enable_sleep = true or a higher ds.zero_stage"
            ) from error
        self.missing.discard(part)


def _free_bytes() -> int:
    """Return the free bytes of the current GPU; 0 without one."""
    import torch

    return int(torch.cuda.mem_get_info()[0]) if torch.cuda.is_available() else 0
