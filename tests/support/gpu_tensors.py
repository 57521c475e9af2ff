"""Tensors in CPU memory that say they are on cuda, and behave so where devices matter. See gpu_standins.py."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

_WAITING = {
    "item",
    "tolist",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
    "nonzero",
    "equal",
    "allclose",
    "is_nonzero",
}
_FREELY_MIXED = {
    "_has_compatible_shallow_copy_type",
    "copy_",
    "set_",
    "__set__",
    "__getitem__",
    "__setitem__",
    "to",
    "swap_tensors",
    "index_put_",
}
_NO_WORK = {
    *("__getitem__", "view", "view_as", "reshape", "narrow", "flatten", "unsqueeze", "squeeze", "transpose", "permute"),
    *("t", "detach", "expand", "chunk", "split", "select", "as_strided", "untyped_storage", "numel", "size", "dim"),
    *("data_ptr", "stride", "storage_offset", "is_contiguous", "element_size", "nelement", "__len__", "set_"),
}
"""Operations that give a GPU no work."""
CPU = torch.device("cpu")


_KNOWN: dict[int, tuple[StorageWeakRef, int, int, Memory]] = {}
"""Storages of the process: those that a module caches outlive one test's stand-ins, and are on the next one's GPU."""


class Memory:
    """Which storages are on which GPU, and how many bytes they take there."""

    def __init__(self, gpus: int, total: int) -> None:
        self.gpus = gpus
        self.total = total
        self.taken = [0] * gpus
        self.freed: Callable[[int], None] = lambda key: None
        """Called for a storage that nobody has any more."""
        self._lock = threading.RLock()
        self._known = _KNOWN

    def add(self, storage: Any, index: int) -> bool:
        """`storage` is on GPU `index`; whether it is new there. Raises OutOfMemoryError."""
        self._forget()
        with self._lock:
            if storage._cdata in self._known:
                return False
            if self.taken[index] + storage.nbytes() > self.total:
                raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {storage.nbytes()} bytes")
            self._known[storage._cdata] = (StorageWeakRef(storage), index, storage.nbytes(), self)
            self.taken[index] += storage.nbytes()
            return True

    def device_of(self, storage: Any) -> torch.device:
        with self._lock:
            found = self._known.get(storage._cdata)
            return torch.device("cuda", found[1]) if found and not found[0].expired() else CPU

    def held(self, index: int) -> int:
        """Bytes that live tensors take of a GPU."""
        self._forget()
        return self.taken[index]

    def _forget(self) -> None:
        with self._lock:
            dead = {key: known for key, known in self._known.items() if known[0].expired()}
            for key, (_, index, nbytes, owner) in dead.items():
                owner.taken[index] -= nbytes
                del self._known[key]
        for key, (*_, owner) in dead.items():
            owner.freed(key)


class DeviceMode(TorchFunctionMode):
    """Sends what is meant for a GPU to the CPU and remembers that it is on the GPU."""

    def __init__(self, memory: Memory, cuda: Any, streams: Any, syncs: Counter[str]) -> None:
        super().__init__()
        self._memory = memory
        self._cuda = cuda
        self._streams = streams
        self._syncs = syncs
        self._pinned: dict[int, StorageWeakRef] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name == "__get__":
            return self._attribute(func, args)
        own = getattr(self, f"_do_{name}", None)
        if own is not None:
            return own(func, args, kwargs)
        return self._run(name, func, args, kwargs)

    def where(self, tensor: torch.Tensor) -> torch.device:
        return self._memory.device_of(tensor.untyped_storage())

    def _attribute(self, func: Any, args: Any) -> Any:
        name = getattr(func.__self__, "__name__", "")
        if name in ("device", "is_cuda", "is_cpu"):
            device = self.where(args[0])
            return device if name == "device" else device.type == name.removeprefix("is_")
        found = func(*args)
        if isinstance(found, torch.Tensor) and self.where(args[0]).type == "cuda":
            self._place(found, self.where(args[0]))  # a gradient, say, that autograd made
        return found

    def _run(self, name: str, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Any function: results are where a `device` says, else where the arguments are."""
        given = list(tensors((args, kwargs)))
        sources = {place: self.where(tensor) for place, tensor in enumerate(given)}
        wanted, args, kwargs = self._on_cpu(args, kwargs)
        here = {device for place, device in sources.items() if given[place].dim() > 0 or device != CPU}
        on_gpu = [device for device in here if device != CPU]
        if len(here) > 1 and name not in _FREELY_MIXED:
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, "
                f"{' and '.join(sorted(map(str, here)))}! (when checking argument in {name})"
            )
        if on_gpu and name not in _NO_WORK:
            self._streams.catch_up()
        pin = kwargs.pop("pin_memory", False)
        before = {tensor.untyped_storage()._cdata for tensor in given}
        result = func(*args, **kwargs)
        target = wanted or (on_gpu[0] if on_gpu else CPU)
        fresh = [each for each in tensors(result) if each.untyped_storage()._cdata not in before]
        for each in fresh:
            if target != CPU:
                self._place(each, target)
            if pin:
                self._pinned[each.untyped_storage()._cdata] = StorageWeakRef(each.untyped_storage())
        writes = in_place(name, args, kwargs)
        if (on_gpu or target != CPU) and (fresh or writes or name in _WAITING):
            read = [each for place, each in enumerate(given) if sources[place] != CPU]
            self._streams.touched(read, [*fresh, *(each for each in writes if self.where(each) != CPU)])
        waits = name in _WAITING or (name == "copy_" and len(here) > 1 and not _quick(args, kwargs))
        if on_gpu and waits:
            self._syncs[name] += 1
            self._streams.current().synchronize_quietly()
        return result

    def _on_cpu(self, args: Any, kwargs: dict[str, Any]) -> tuple[torch.device | None, Any, dict[str, Any]]:
        """The device that the arguments name, and the arguments with the CPU in its place."""
        wanted: list[torch.device] = []

        def swap(value: Any) -> Any:
            if isinstance(value, torch.device) or (isinstance(value, str) and value.partition(":")[0] == "cuda"):
                wanted.append(self._cuda._device(value))
                return CPU if wanted[-1].type == "cuda" else value
            return value

        args = tuple(swap(value) for value in args)
        kwargs = {key: swap(value) if key == "device" else value for key, value in kwargs.items()}
        if isinstance(kwargs.get("device"), int):
            wanted.append(self._cuda._device(kwargs["device"]))
            kwargs["device"] = CPU
        if isinstance(kwargs.get("device"), str):
            wanted.append(torch.device(kwargs["device"]))
        return (wanted[0] if wanted else None), args, kwargs

    def _place(self, tensor: torch.Tensor, device: torch.device) -> None:
        if device.type == "cuda" and self._memory.add(tensor.untyped_storage(), device.index):
            self._streams.allocated(tensor.untyped_storage())

    def _moved(self, source: torch.Tensor, result: torch.Tensor, target: torch.device, quick: bool) -> torch.Tensor:
        came = self.where(source)
        if came == target:
            return result
        if result.untyped_storage()._cdata == source.untyped_storage()._cdata:
            result = result.clone()
        self._place(result, target)
        self._streams.catch_up()
        self._streams.touched([source] if came != CPU else [], [result] if target != CPU else [])
        if not (quick and CPU in (came, target)):
            self._syncs["to"] += 1
            self._streams.current().synchronize_quietly()
        return result

    def _do_to(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        other = next((each for each in args[1:] if isinstance(each, torch.Tensor)), kwargs.get("other"))
        if isinstance(args[0], torch.Tensor) and len(args) > 1 and type(args[1]) is int:
            args = (args[0], torch.device("cuda", args[1]), *args[2:])
        wanted, args, kwargs = self._on_cpu(args, kwargs)
        target = wanted or (self.where(other) if other is not None else self.where(args[0]))
        quick = bool(kwargs.get("non_blocking")) or next((each for each in args[1:] if isinstance(each, bool)), False)
        if self.where(args[0]) != CPU:
            self._streams.catch_up()
        result = func(*args, **kwargs)
        if self.where(args[0]) == target:  # a change of dtype, at most
            self._place(result, target)
            return result
        return self._moved(args[0], result, target, quick)

    def _do_device(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return func(*args, **kwargs)  # torch.device itself, and what Module.to calls to read its arguments

    _do__parse_to = _do_device

    def _do_cpu(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return self._moved(args[0], func(*args, **kwargs), CPU, quick=False)

    def _do_numpy(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if self.where(args[0]) != CPU:
            raise TypeError(
                f"can't convert {self.where(args[0])} device type tensor to numpy. Use Tensor.cpu() to copy the tensor "
                "to host memory first."
            )
        return func(*args, **kwargs)

    _do___array__ = _do_numpy

    def _do_get_device(self, func: Any, args: Any, kwargs: dict[str, Any]) -> int:
        device = self.where(args[0])
        return -1 if device == CPU else int(device.index)

    def _do_pin_memory(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if self.where(args[0]) != CPU:
            raise RuntimeError("cannot pin 'torch.cuda.ByteTensor' only dense CPU tensors can be pinned")
        copy = args[0].clone()
        self._pinned[copy.untyped_storage()._cdata] = StorageWeakRef(copy.untyped_storage())
        return copy

    def _do_is_pinned(self, func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
        found = self._pinned.get(args[0].untyped_storage()._cdata)
        return found is not None and not found.expired()


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from tensors(each)
    elif isinstance(value, dict):
        for each in value.values():
            yield from tensors(each)


def in_place(name: str, args: Any, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The arguments that a function writes to."""
    found = list(tensors(kwargs.get("out")))
    own = name in ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__iand__", "__ior__", "__ixor__")
    if (own or (name.endswith("_") and not name.startswith("_"))) and name not in ("set_", "requires_grad_"):
        found += list(tensors(args[:1]))
    return found


def _quick(args: Any, kwargs: dict[str, Any]) -> bool:
    return bool(kwargs.get("non_blocking")) or (len(args) > 2 and args[2] is True)
