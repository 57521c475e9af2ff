"""Encode values to frames and decode them: a header in msgpack, by msgspec, then one raw frame per large numpy array.

`call` declares a method as a call; its signature says which values go out and come back.

What travels: None, bool, int, float, str, bytes, lists, tuples, dicts, numpy numbers (arrive as Python's), numpy arrays
of one axis, and records (`records.Record` and named tuples). The receiver declares the type that it expects: anything
else is refused with a WireError that names the field. Nothing is converted silently, except an int where a float is
declared. Nothing that is decoded is ever executed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import msgspec
import numpy as np
from numpy.typing import NDArray

from slurm_rlhf.config.schema_jobs import Timeout
from slurm_rlhf.errors import WireError

Buffer = bytes | memoryview
Reader = Callable[[Sequence[Buffer]], Any]
"""Decodes the frames of a message."""

MAX_HEADER_BYTES = 64 << 20
MAX_FRAME_BYTES = 1 << 30
MAX_FRAMES = 1 << 16

# Below this a frame of its own costs more (encryption, system calls, bookkeeping) than one copy.
INLINE_BYTES = 4096

_ARRAY = 1
# Only these reach np.dtype(), whose own grammar would also make objects and structures.
_DTYPES = frozenset(np.dtype(name).str for name in ("bool", "uint8", "int32", "int64", "float32", "float64"))
_array_decoder = msgspec.msgpack.Decoder(tuple[int | bytes, str])
"""Reads an array in a header: its content or the number of its frame, and its dtype."""


def encode(value: Any) -> list[Buffer]:
    """Make frames of `value`: the header, then the bytes of each array of at least INLINE_BYTES.

    Contiguous arrays are not copied: they must not change until the frames were sent.
    Raises WireError for a value that cannot travel.
    """
    arrays: list[Buffer] = []

    def pack(item: Any) -> Any:
        if isinstance(item, np.ndarray):
            return _pack_array(item, arrays)
        if isinstance(item, np.bool_ | np.integer | np.floating) and type(number := item.item()) in (bool, int, float):
            return number
        raise WireError(
            f"a {type(item).__module__}.{type(item).__qualname__} cannot be sent; numbers, str, bytes, lists, dicts, "
            "numpy arrays and records can"
        )

    with _refusal("a value cannot be sent"):
        header = msgspec.msgpack.Encoder(enc_hook=pack).encode(value)
    if len(header) > MAX_HEADER_BYTES:
        raise WireError(
            f"a message's header of {len(header)} bytes is over the limit of {MAX_HEADER_BYTES}; "
            "bulk data travels in numpy arrays, not in lists and strings"
        )
    if len(arrays) >= MAX_FRAMES:
        raise WireError(f"{len(arrays)} large arrays in one message, at most {MAX_FRAMES - 1} can be sent; concatenate")
    return [header, *arrays]


def decode(frames: Sequence[Buffer], declared: Any = Any, name: str = "a message") -> Any:
    """Read a value of the type `declared` from the frames that `encode` made; errors call it `name`.

    Arrays are aligned and writable; those of a frame of their own share its memory when it is writable and aligned.
    Raises WireError for anything else, never another exception.
    """
    unused = dict(enumerate(frames[1:]))

    def unpack(code: int, data: memoryview) -> NDArray[Any]:
        if code != _ARRAY:
            raise WireError(f"{name} has the extension type {code}, which is unknown")
        content, dtype = _array_decoder.decode(data)
        if dtype not in _DTYPES:
            raise WireError(f"{dtype[:40]!r} is no dtype of an array that travels")
        array = np.frombuffer(unused.pop(content) if isinstance(content, int) else content, dtype)
        return array if array.flags.writeable and array.flags.aligned else array.copy()

    with _refusal(f"{name} does not decode"):
        value = msgspec.msgpack.Decoder(declared, dec_hook=_checked, ext_hook=unpack).decode(frames[0])
    if unused:
        raise WireError(f"{name} has {len(unused)} frames that belong to no array")
    return value


def read(declared: Any, value: Any, name: str) -> Any:
    """Convert a part of a message that was decoded without its type to the type `declared`. Raises WireError."""
    with _refusal(f"{name} is not what is declared"):
        return msgspec.convert(value, declared, dec_hook=_checked)


@contextmanager
def _refusal(what: str) -> Iterator[None]:
    """Turn every exception into a WireError whose message begins with `what`."""
    try:
        yield
    except WireError:
        raise
    except Exception as error:
        # msgspec and numpy raise many kinds of errors for malformed input; here all of them mean the same.
        raise WireError(f"{what}: {error if isinstance(error, msgspec.MsgspecError) else repr(error)}") from error


@cache
def _declared_dtype(declared: Any) -> np.dtype[Any]:
    """Return the dtype of a declared array. Raises TypeError for anything but an array."""
    if get_origin(declared) is not np.ndarray:
        raise TypeError(f"{declared} cannot travel between processes; numbers, str, bytes, arrays and records can")
    (scalar,) = get_args(get_args(declared)[1])
    return np.dtype(scalar)


def _checked(declared: Any, value: Any) -> Any:
    """Return `value` if it is an array as declared; msgspec adds the field's path to the error."""
    wanted = _declared_dtype(declared)
    found = value.dtype if isinstance(value, np.ndarray) else type(value).__name__
    if found != wanted:
        raise TypeError(f"Expected an array of {wanted}, got {found}")
    return value


def _pack_array(array: NDArray[Any], arrays: list[Buffer]) -> msgspec.msgpack.Ext:
    name = array.dtype.str
    if name not in _DTYPES or array.ndim != 1:
        raise WireError(f"an array of dtype {array.dtype} and shape {array.shape} cannot be sent")
    if array.nbytes > MAX_FRAME_BYTES:
        raise WireError(f"an array of {array.nbytes} bytes is over the limit of {MAX_FRAME_BYTES}; send it in parts")
    content: int | bytes = len(arrays)
    if array.nbytes < INLINE_BYTES:
        content = array.tobytes()
    else:
        arrays.append(np.ascontiguousarray(array).view(np.uint8).data)
    return msgspec.msgpack.Ext(_ARRAY, msgspec.msgpack.encode((content, name)))


F = TypeVar("F", bound=Callable[..., Any])

_DEADLINE = "__deadline__"


@dataclass(frozen=True, slots=True)
class CallSpec:
    """Holds the declaration of a call."""

    name: str
    deadline: str | None  # a field of config.schema_jobs.Timeout; None: it has no answer
    argument: Any  # its record; None: it takes no argument
    result: Any

    def seconds(self, timeout: Timeout) -> float:
        """Return how long the call may take."""
        limit: float = getattr(timeout, str(self.deadline))
        return limit

    def read_result(self, frames: Sequence[Buffer]) -> Any:
        """Decode the result. Raises WireError."""
        return decode(frames, self.result, f"the result of {self.name}")


def call(*, deadline: str | None) -> Callable[[F], F]:
    """Declare a method as a call that may take `deadline`, a field of `config.schema_jobs.Timeout`.

    None: the call has no answer, and nobody waits for it.
    """

    def declare(method: F) -> F:
        setattr(method, _DEADLINE, deadline)
        method.__isabstractmethod__ = True  # type: ignore[attr-defined]
        return method

    return declare


@cache
def spec_of(method: Callable[..., Any]) -> CallSpec:
    """Return the declaration of a method."""
    hints = get_type_hints(method)
    result = hints["return"]
    if get_origin(result) is Future:
        (result,) = get_args(result)
    parameters = list(inspect.signature(method).parameters)[1:]
    argument = hints[parameters[0]] if parameters else None
    return CallSpec(method.__name__, getattr(method, _DEADLINE), argument, result)


@cache
def calls_of(role: type[Any]) -> dict[str, CallSpec]:
    """Map the names of all calls of a class and of its bases to their declarations."""
    declared: dict[str, Any] = {}
    for base in role.__mro__:
        for name, member in vars(base).items():
            if hasattr(member, _DEADLINE):
                declared.setdefault(name, member)
    return {name: spec_of(member) for name, member in declared.items()}
