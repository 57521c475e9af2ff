"""torch.cuda's functions for the stand-ins. See gpu_standins.py."""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gpu_signatures import Stub
from gpu_streams import Streams


@dataclass
class Properties:
    """Holds what torch.cuda.get_device_properties gives; its fields are compared with the stub's."""

    name: str
    uuid: str
    total_memory: int
    major: int = 9
    minor: int = 0
    pci_bus_id: int = 0


def properties_in_torch() -> set[str]:
    """Names of a GPU's properties: those of the stub, and those that it forgets and torch uses (PCI addresses)."""
    if hasattr(torch._C, "_CudaDeviceProperties"):
        return set(dir(torch._C._CudaDeviceProperties))
    home = Path(torch.__file__).parent
    used = re.findall(r"device_properties\.(\w+)", (home / "numa" / "binding.py").read_text())
    return Stub(home / "_C" / "__init__.pyi", "_CudaDeviceProperties").fields | set(used)


class Cuda:
    """The functions of torch.cuda that have a stand-in; `_` ones are the stand-ins' own."""

    def __init__(self, gpus: Sequence[str], memory: Any, streams: Streams, syncs: Counter[str]) -> None:
        self._gpus, self._memory, self._streams, self._syncs = gpus, memory, streams, syncs
        self._local = threading.local()  # every thread begins on GPU 0
        self._seed = 0
        self._states: dict[int, torch.Tensor] = {}
        self.Stream, self.Event = streams.Stream, streams.Event
        wrong = set(Properties.__dataclass_fields__) - properties_in_torch()
        assert not wrong, f"a GPU's properties have no {wrong}"
        cuda = self

        class device:
            """torch.cuda.device: within it another GPU is the current one."""

            def __init__(self, device: Any) -> None:
                self.idx = cuda._device(device).index

            def __enter__(self) -> None:
                self.prev_idx, cuda._current = cuda._current, self.idx

            def __exit__(self, type: Any, value: Any, traceback: Any) -> None:
                cuda._current = self.prev_idx

        class StreamContext:
            """Stands in for the context that torch.cuda.stream returns."""

            def __init__(self, stream: Any) -> None:
                self.stream = stream

            def __enter__(self) -> None:
                self.before = streams.choose(self.stream) if self.stream is not None else None

            def __exit__(self, type: Any, value: Any, traceback: Any) -> None:
                if self.stream is not None:
                    streams.choose(self.before)

        self.device, self.StreamContext = device, StreamContext

    @property
    def _current(self) -> int:
        return getattr(self._local, "index", 0)

    @_current.setter
    def _current(self, index: int) -> None:
        self._local.index = index

    def _device(self, device: Any = None) -> torch.device:
        """Return a device with its number. Raises RuntimeError for one that is not there."""
        if device is None:
            return torch.device("cuda", self._current)
        found = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        if found.type != "cuda":
            return found
        found = torch.device("cuda", self._current if found.index is None else found.index)
        if found.index >= len(self._gpus):
            raise RuntimeError("CUDA error: invalid device ordinal")
        return found

    def is_available(self) -> bool:
        return bool(self._gpus)

    def is_bf16_supported(self, including_emulation: bool = True) -> bool:
        return True

    def device_count(self) -> int:
        return len(self._gpus)

    def current_device(self) -> int:
        return self._current

    def set_device(self, device: Any) -> None:
        self._current = self._device(device).index

    def get_device_name(self, device: Any = None) -> str:
        return self.get_device_properties(device).name

    def get_device_properties(self, device: Any = None) -> Properties:
        index = self._device(device).index
        return Properties("NVIDIA H100 80GB HBM3", self._gpus[index], self._memory.total, pci_bus_id=index)

    def synchronize(self, device: Any = None) -> None:
        self._syncs["synchronize"] += 1
        for stream in list(self._streams.known):
            stream.synchronize_quietly()

    def current_stream(self, device: Any = None) -> Any:
        return self._streams.current()

    def default_stream(self, device: Any = None) -> Any:
        return self._streams.default

    def stream(self, stream: Any) -> Any:
        return self.StreamContext(stream)

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        return self._memory.total - self.memory_allocated(device), self._memory.total

    def memory_allocated(self, device: Any = None) -> int:
        return int(self._memory.held(self._device(device).index))

    memory_reserved = memory_allocated

    def empty_cache(self) -> None: ...

    def ipc_collect(self) -> None: ...

    def manual_seed_all(self, seed: int) -> None:
        self._seed = seed

    def get_rng_state(self, device: Any = "cuda") -> torch.Tensor:
        index = self._device(device).index
        return self._states.setdefault(index, torch.full((16,), self._seed % 251, dtype=torch.uint8)).clone()

    def set_rng_state(self, new_state: torch.Tensor, device: Any = "cuda") -> None:
        if new_state.device.type != "cpu" or new_state.dtype != torch.uint8:
            raise TypeError("RNG state must be a torch.ByteTensor")
        self._states[self._device(device).index] = new_state.clone()
