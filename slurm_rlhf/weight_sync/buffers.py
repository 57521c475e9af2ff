"""Memory that updates use again: on CPUs the first touch of fresh pages costs more than the transfer of their bytes."""

from __future__ import annotations

import threading
import weakref
from collections import deque

import torch

_WASTE = 2  # a block serves requests down to its size over this


class Pool:
    """Hands out uint8 tensors [n]; when the last view of one is gone, by whomever, its memory is free again."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.peak = 0  # bytes that were out at a time
        self._out = 0
        self._lock = threading.Lock()
        self._returned: deque[torch.Tensor] = deque()
        self._gone: deque[int] = deque()
        self._free: list[torch.Tensor] = []

    def take(self, nbytes: int) -> torch.Tensor:
        """A tensor of `nbytes`, its contents undefined. Any thread."""
        if self.device.type != "cpu":
            return self._counted(nbytes)
        with self._lock:
            while self._returned:
                block = self._returned.popleft()
                self._out -= block.numel()
                self._free.append(block)
            fitting = [block for block in self._free if nbytes <= block.numel() <= _WASTE * max(nbytes, 1)]
            if fitting:
                block = min(fitting, key=torch.Tensor.numel)
                self._free = [other for other in self._free if other is not block]
            else:
                block = torch.empty(max(nbytes, 1), dtype=torch.uint8)
            self._out += block.numel()
            self.peak = max(self.peak, self._out)
        # The tensor and all views of it keep this array, and nothing else does.
        lent = block.numpy()[:nbytes]
        # A finalizer runs wherever the last reference goes, in the middle of `take` too: it must not want the lock.
        weakref.finalize(lent, self._returned.append, block).atexit = False
        return torch.from_numpy(lent)

    def _counted(self, nbytes: int) -> torch.Tensor:
        """Fresh memory of a GPU: its allocator keeps what is given back by itself."""
        tensor = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        with self._lock:
            while self._gone:
                self._out -= self._gone.popleft()
            self._out += nbytes
            self.peak = max(self.peak, self._out)
        # All views share the storage, and its object lives as long as they.
        weakref.finalize(tensor.untyped_storage(), self._gone.append, nbytes).atexit = False
        return tensor
