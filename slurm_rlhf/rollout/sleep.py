"""An engine's device memory, given up while others use the accelerator and taken back before it generates."""

from __future__ import annotations

from typing import Any, Protocol

from slurm_rlhf.errors import RunError
from slurm_rlhf.records import KV_CACHE, WEIGHTS

PARTS = (WEIGHTS, KV_CACHE)
"""vLLM's tags for what an engine holds, in the order in which it is taken back."""

_DISCARD = 2
"""vLLM's sleep level: the weights are not kept, because those of the next policy version take their place anyway."""


class Sleeper(Protocol):
    """An engine that shares its accelerator. Called between two steps by the thread that owns it; both calls block."""

    def sleep(self) -> int:
        """Drop all requests and give up weights and KV cache; the device's free bytes grew by so many.

        It refuses to step until `wake_up` has brought back all parts and `load_weights` has brought weights.
        """
        ...

    def wake_up(self, part: str) -> None:
        """Take back "weights", before `load_weights`, or "kv_cache". Raises RunError where the memory is not free."""
        ...


class DeviceMemory:
    """Of one vLLM engine in this process. On CPUs vLLM takes the same calls and keeps all of its memory."""

    def __init__(self, llm: Any, share: float) -> None:
        """`llm`: an `LLMEngine`, with enable_sleep_mode where there is a GPU. `share`: its gpu_memory_utilization."""
        self._llm = llm
        self._share = share
        self.missing: set[str] = set()

    def give_up(self) -> int:
        """See `Sleeper.sleep`."""
        before = _free_bytes()
        self.missing = set(PARTS)
        self._llm.sleep(level=_DISCARD)
        return max(0, _free_bytes() - before)

    def take_back(self, part: str) -> None:
        """See `Sleeper.wake_up`."""
        if part not in self.missing:
            raise RunError(f"the engine has its {part} already; parts that it lacks: {sorted(self.missing)}")
        try:
            self._llm.wake_up(tags=[part])
        except Exception as error:
            raise RunError(
                f"the engine cannot take back its {part}: {error}. With train.colocate_all it needs "
                f"vllm.gpu_memory_utilization = {self._share:g} of the GPU beside what the other roles keep there: "
                f"lower it, or set ds.enable_sleep = true or a higher ds.zero_stage"
            ) from error
        self.missing.discard(part)

    def require(self, *parts: str) -> None:
        """Raise RunError unless the engine has them."""
        asleep = [part for part in parts if part in self.missing]
        if asleep:
            raise RunError(f"the engine is asleep: it has given up its {' and '.join(asleep)}, and wake_up comes first")


def _free_bytes() -> int:
    """Of the current GPU; 0 without one."""
    import torch

    return int(torch.cuda.mem_get_info()[0]) if torch.cuda.is_available() else 0
