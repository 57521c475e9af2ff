"""Python values to frames and back: a msgpack header, then one raw frame per large numpy array.

What travels: None, bool, int, float, str, bytes, list, tuple (arrives as a list), dict with str or int keys, numpy
arrays of any dtype but object and structured ones, numpy numbers (arrive as Python numbers) and dataclasses (arrive as
the dict of their fields; `declarations` makes records of them). Nothing that is decoded is ever executed, and whatever
does not decode raises WireError.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from slurm_rlhf.errors import WireError

Buffer = bytes | memoryview

MAX_HEADER_BYTES = 64 << 20
MAX_FRAME_BYTES = 1 << 30
MAX_FRAMES = 1 << 16
MAX_DEPTH = 100

# Below this a frame of its own costs more (encryption, system calls, bookkeeping) than one copy.
INLINE_BYTES = 4096

_FRAME, _INLINE = 1, 2
# Only names of plain dtypes reach np.dtype(), whose own grammar would also make objects and structures.
_DTYPE = re.compile(r"[<>|=][?biufcmMSU]\d{1,9}(\[\d{0,9}[a-zA-Z]{1,2}\])?")
_EXPECTED = "None, bool, int, float, str, bytes, list, tuple, dict, numpy arrays and dataclasses"


def encode(value: Any) -> list[Buffer]:
    """Make frames of `value`: the header, then the bytes of each array of at least INLINE_BYTES.

    Contiguous arrays are not copied: they must not change until the frames were sent.
    Raises WireError for a value that cannot travel.
    """
    arrays: list[Buffer] = []

    def default(item: Any) -> Any:
        if isinstance(item, np.ndarray):
            return _encode_array(item, arrays)
        if isinstance(item, tuple):
            return list(item)
        if isinstance(item, np.bool_ | np.integer | np.floating) and type(number := item.item()) in (bool, int, float):
            return number
        if dataclasses.is_dataclass(item) and not isinstance(item, type):
            record = {field.name: getattr(item, field.name) for field in dataclasses.fields(item)}
            _check_structure(record, 0)
            return record
        raise WireError(f"a {type(item).__module__}.{type(item).__qualname__} cannot be sent; what can: {_EXPECTED}")

    _check_structure(value, 0)
    try:
        header = msgpack.packb(value, default=default, strict_types=True, unicode_errors="surrogatepass")
    except (ValueError, TypeError, OverflowError) as error:
        raise WireError(f"a value cannot be sent: {error}") from error
    if len(header) > MAX_HEADER_BYTES:
        raise WireError(
            f"a message's header of {len(header)} bytes is over the limit of {MAX_HEADER_BYTES}; "
            "bulk data travels in numpy arrays, not in lists and strings"
        )
    if len(arrays) >= MAX_FRAMES:
        raise WireError(f"{len(arrays)} large arrays in one message, at most {MAX_FRAMES - 1} can be sent; concatenate")
    return [header, *arrays]


def decode(frames: Sequence[Buffer]) -> Any:
    """Read the value that `encode` made `frames` of.

    Arrays are aligned and writable; those of a frame of their own share its memory when it is writable and aligned.
    Raises WireError for anything else than frames of `encode`, never another exception.
    """
    if not 0 < len(frames) <= MAX_FRAMES:
        raise WireError(f"a message of {len(frames)} frames; between 1 and {MAX_FRAMES} are allowed")
    header = memoryview(frames[0])
    if header.nbytes > MAX_HEADER_BYTES:
        raise WireError(f"a message's header of {header.nbytes} bytes is over the limit of {MAX_HEADER_BYTES}")
    unused = dict(enumerate(frames[1:]))

    def ext_hook(code: int, data: bytes) -> Any:
        if code == _FRAME:
            index, dtype, shape = msgpack.unpackb(data)
            return _array(unused.pop(index), dtype, shape)
        if code == _INLINE:
            dtype, shape, content = msgpack.unpackb(data)
            return _array(content, dtype, shape)
        raise WireError(f"extension type {code} is unknown")

    try:
        value = msgpack.unpackb(
            header,
            ext_hook=ext_hook,
            object_pairs_hook=_mapping,
            strict_map_key=False,
            unicode_errors="surrogatepass",
        )
    except WireError:
        raise
    except Exception as error:
        # msgpack and numpy raise many kinds on malformed input; at this border all of them mean the same.
        raise WireError(f"a message does not decode: {type(error).__name__}: {error}") from error
    if unused:
        raise WireError(f"{len(unused)} frames of a message belong to no array")
    return value


def _check_structure(value: Any, depth: int) -> None:
    """Refuse here what the receiver would refuse: the error then names the line that made the value."""
    if depth > MAX_DEPTH:
        raise WireError(
            f"a value nested more than {MAX_DEPTH} levels deep, or one that contains itself, cannot be sent"
        )
    if isinstance(value, dict):
        for key, item in value.items():
            if type(key) not in (str, int):
                raise WireError(f"the key {key!r} of a dict cannot be sent; keys are str or int")
            if isinstance(item, dict | list | tuple):
                _check_structure(item, depth + 1)
    elif isinstance(value, list | tuple):
        for item in value:
            if isinstance(item, dict | list | tuple):
                _check_structure(item, depth + 1)


def _encode_array(array: NDArray[Any], arrays: list[Buffer]) -> msgpack.ExtType:
    name = array.dtype.str
    if not _DTYPE.fullmatch(name) or array.dtype.itemsize == 0:
        raise WireError(f"an array of dtype {array.dtype} cannot be sent; plain numbers, times and strings can")
    if array.nbytes > MAX_FRAME_BYTES:
        raise WireError(f"an array of {array.nbytes} bytes is over the limit of {MAX_FRAME_BYTES}; send it in parts")
    contiguous = array if array.flags.c_contiguous else array.copy(order="C")
    if array.nbytes < INLINE_BYTES:
        return msgpack.ExtType(_INLINE, msgpack.packb((name, array.shape, contiguous.tobytes())))
    arrays.append(contiguous.reshape(-1).view(np.uint8).data)
    return msgpack.ExtType(_FRAME, msgpack.packb((len(arrays) - 1, name, array.shape)))


def _array(content: Buffer, name: Any, shape: Any) -> NDArray[Any]:
    view = memoryview(content)
    if not isinstance(name, str) or not _DTYPE.fullmatch(name):
        raise WireError(f"{str(name)[:40]!r} is no dtype of an array that travels")
    dtype = np.dtype(name)
    if not isinstance(shape, list) or len(shape) > 32 or any(type(n) is not int or n < 0 for n in shape):
        raise WireError(f"{str(shape)[:80]} is no shape of an array")
    expected = dtype.itemsize
    for size in shape:
        expected *= size
    if view.nbytes != expected or dtype.itemsize == 0:
        raise WireError(f"an array of dtype {name} and shape {shape} came with {view.nbytes} bytes")
    if expected == 0:
        return np.empty(shape, dtype)
    array: NDArray[Any] = np.ndarray(tuple(shape), dtype, buffer=view)
    return array if array.flags.writeable and array.flags.aligned else array.copy()


def _mapping(pairs: list[tuple[Any, Any]]) -> dict[str | int, Any]:
    for key, _ in pairs:
        if type(key) not in (str, int):
            raise WireError(f"a map's key is a {type(key).__name__}; keys are str or int")
    return dict(pairs)
