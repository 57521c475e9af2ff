"""Messages as bytes: values, records, and what is refused."""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from msgspec import msgpack
from msgspec.structs import asdict
from numpy.typing import NDArray

from slurm_rlhf.errors import WireError
from slurm_rlhf.records import ParameterSpec, Record, Trajectory, VersionSpan, pack
from slurm_rlhf.wire import codec
from slurm_rlhf.wire.calls import EngineLoad, GenerateAnswer, TrainBatch
from slurm_rlhf.wire.codec import INLINE_BYTES, decode, encode, read

DTYPES = st.sampled_from(sorted(codec._DTYPES)).map(np.dtype)
ARRAYS = hnp.arrays(DTYPES, st.integers(0, 6))
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(),
    st.text(max_size=20),
    st.binary(max_size=20),
    ARRAYS,
)
KEYS = st.one_of(st.text(max_size=8), st.integers(-(2**63), 2**64 - 1))
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4), max_leaves=20
)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, float):
        return isinstance(b, float) and (a == b or (math.isnan(a) and math.isnan(b)))
    if isinstance(a, list | tuple):
        return isinstance(b, list) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    return type(a) is type(b) and a == b


@given(VALUES)
@settings(max_examples=150, deadline=None)
def test_what_is_sent_arrives(value: Any) -> None:
    assert same(value, decode(encode(value)))


@given(DTYPES, st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_large_arrays_travel_in_frames_of_their_own(dtype: np.dtype[Any], seed: int) -> None:
    raw = np.frombuffer(np.random.default_rng(seed).bytes(dtype.itemsize * INLINE_BYTES), np.uint8)
    array = raw.view(dtype) if dtype.kind != "b" else (raw & 1).view(dtype)
    frames = encode({"a": array, "b": [array[:3], array]})
    assert len(frames) == 3
    assert same({"a": array, "b": [array[:3], array]}, decode(frames))


def test_a_large_contiguous_array_is_not_copied() -> None:
    array = np.arange(10_000)
    frames = encode({"array": array})
    assert np.shares_memory(np.frombuffer(frames[1], np.uint8), array)
    received = bytearray(frames[1])
    assert np.shares_memory(decode([frames[0], memoryview(received)])["array"], np.frombuffer(received, np.uint8))


@pytest.mark.parametrize("size", [3, 5000])
@pytest.mark.parametrize("offset", range(8))
def test_arrays_arrive_aligned_and_writable(size: int, offset: int) -> None:
    frames = encode(np.arange(size, dtype=np.float64))
    moved = [memoryview(b"x" * offset + bytes(frame))[offset:] for frame in frames]
    array = decode(moved)
    assert array.flags.aligned
    array += 1
    assert array[0] == 1


@pytest.mark.parametrize("order", ["strided", "reversed", "read-only"])
def test_any_memory_layout_travels(order: str) -> None:
    array = np.arange(20_000, dtype=np.int32)
    array = {"strided": array[1::3], "reversed": array[::-1], "read-only": array}[order]
    array.flags.writeable = order != "read-only"
    assert same(np.ascontiguousarray(array), decode(encode(array)))


def test_tuples_and_numpy_numbers_arrive_as_plain_ones() -> None:
    sent = {"t": (1, (2.5, "x")), "n": [np.float32(0.5), np.int64(-3), np.bool_(True), np.float64(1e300)]}
    received = decode(encode(sent))
    assert received == {"t": [1, [2.5, "x"]], "n": [0.5, -3, True, 1e300]}
    assert [type(n) for n in received["n"]] == [float, int, bool, float]


def test_records_of_the_run_arrive_as_they_were() -> None:
    trajectory = Trajectory(
        7,
        1,
        np.arange(4, dtype=np.int32),
        np.arange(2, dtype=np.int32),
        np.array([-0.5, -1.5], np.float32),
        np.array([True, False]),
        "stop",
        "4",
        [VersionSpan(0, 1, 3), VersionSpan(1, 2, 4)],
    )
    answer = GenerateAnswer([trajectory], EngineLoad(tokens=3))
    assert repr(decode(encode(answer), GenerateAnswer)) == repr(answer)
    batch = TrainBatch(pack([trajectory] * 3000, [1.0] * 3000), [[0, 1], [2]], 6.0)
    found = decode(encode(batch), TrainBatch)
    assert (found.micro, found.denominator) == (batch.micro, 6.0)
    assert same(asdict(batch.experience), asdict(found.experience))


class Inner(Record):
    name: str
    sizes: list[int]


class Outer(Record):
    number: float
    inner: Inner
    others: dict[str, Inner]
    array: NDArray[np.float32]
    way: Literal["a", "b"]
    flags: list[bool]
    specs: list[ParameterSpec]
    perhaps: Inner | None = None


GOOD: dict[str, Any] = {
    "number": 1,
    "inner": {"name": "x", "sizes": [1, 2]},
    "others": {"y": {"name": "y", "sizes": []}},
    "array": np.zeros(2, np.float32),
    "way": "a",
    "flags": [True],
    "specs": [["w", [2, 3], "float32"]],
}


@pytest.mark.parametrize("typed", [True, False], ids=["decode", "read"])
def test_nested_records_arrive(typed: bool) -> None:
    def as_sent(value: Any) -> Outer:
        found: Outer = decode(encode(value), Outer) if typed else read(Outer, decode(encode(value)), "it")
        return found

    record = as_sent(GOOD)
    assert (record.number, type(record.number)) == (1.0, float)
    assert (record.inner, record.others) == (Inner("x", [1, 2]), {"y": Inner("y", [])})
    assert record.specs == [ParameterSpec("w", [2, 3], "float32")]
    assert repr(as_sent(asdict(record) | {"inner": GOOD["inner"], "others": GOOD["others"]})) == repr(record)
    assert as_sent(GOOD | {"perhaps": GOOD["inner"]}).perhaps == record.inner


@pytest.mark.parametrize(
    ("change", "stated"),
    [
        ({"more": 1}, "Object contains unknown field `more`$"),
        ({"inner": {"name": "x", "sizes": [], "more": 1}}, r"unknown field `more` - at `\$\.inner`"),
        ({"inner": {"name": "x"}}, r"missing required field `sizes` - at `\$\.inner`"),
        ({"number": "1"}, r"Expected `float`, got `str` - at `\$\.number`"),
        ({"inner": {"name": b"x", "sizes": []}}, r"Expected `str`, got `bytes` - at `\$\.inner\.name`"),
        ({"array": np.zeros(2)}, r"Expected an array of float32, got float64 - at `\$\.array`"),
        ({"array": [1]}, r"Expected an array of float32, got list - at `\$\.array`"),
    ],
    ids=str,
)
def test_everything_but_what_is_declared_is_refused_by_its_place(change: dict[str, Any], stated: str) -> None:
    with pytest.raises(WireError, match=f"^it does not decode: .*{stated}"):
        decode(encode(GOOD | change), Outer, "it")
    with pytest.raises(WireError, match=r"^it is not what is declared: "):
        read(Outer, GOOD | change, "it")


CYCLE: list[Any] = []
CYCLE.append(CYCLE)


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (object(), "builtins.object"),
        (np.array([object()]), "dtype object"),
        (np.zeros(3, dtype=[("a", "f4")]), "dtype"),
        (np.zeros((2, 1)), r"shape \(2, 1\)"),
        (np.longdouble(1), "longdouble"),
        (1 << 64, "cannot be sent"),
        (CYCLE, "RecursionError"),
        ({"text": "4\ud800"}, "surrogates not allowed"),
        (same, "function"),
    ],
)
def test_what_cannot_travel_is_refused_before_it_is_sent(value: Any, named: str) -> None:
    with pytest.raises(WireError, match=named):
        encode(value)


def test_sizes_have_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "MAX_HEADER_BYTES", 1000)
    monkeypatch.setattr(codec, "MAX_FRAME_BYTES", 10_000)
    monkeypatch.setattr(codec, "MAX_FRAMES", 3)
    with pytest.raises(WireError, match="header of"):
        encode("x" * 1000)
    with pytest.raises(WireError, match="10001 bytes"):
        encode(np.zeros(10_001, np.uint8))
    with pytest.raises(WireError, match="3 large arrays"):
        encode([np.zeros(INLINE_BYTES, np.uint8)] * 3)


def ext(content: Any, dtype: Any, *more: Any, code: int = 1) -> msgpack.Ext:
    return msgpack.Ext(code, msgpack.encode((content, dtype, *more)))


@pytest.mark.parametrize(
    "header",
    [
        ext(0, "|O8"),
        ext(0, "<f4,<f4"),
        ext(0, "(2,)<f4"),
        ext(0, "<f3"),
        ext(0, "<U999999999"),
        ext(0, "<M8[xx]"),
        ext(0, 4),
        ext(0, "<f8", [10]),
        ext(1, "<f8"),
        ext(-1, "<f8"),
        ext([], "<f8"),
        [ext(0, "<f8")] * 2,
        ext("text", "<f8"),
        ext(None, "<f8"),
        ext(b"seven b", "<f8"),
        ext(b"", "<U0"),
        ext(0, "<f8", code=9),
        None,
    ],
    ids=repr,
)
def test_malformed_arrays_are_refused(header: Any) -> None:
    with pytest.raises(WireError):
        decode([msgpack.encode(header), bytes(80)])


@pytest.mark.parametrize(
    ("header", "why"),
    [
        (b"\x91" * 100_000 + b"\xc0", "RecursionError"),
        (b"\x81\xa1a" * 100_000 + b"\xc0", "RecursionError"),
        (b"\xa3\xed\xa0\x80", "utf-8"),
    ],
    ids=len,
)
def test_deep_nesting_and_lone_surrogates_are_refused(header: bytes, why: str) -> None:
    with pytest.raises(WireError, match=f"does not decode: .*{why}"):
        decode([header])


SAMPLE = encode(GOOD | {"array": np.arange(2000, dtype=np.float32)})


@given(st.lists(st.binary(max_size=200), max_size=4))
@settings(max_examples=300, deadline=None)
def test_random_frames_never_raise_anything_else(frames: list[bytes]) -> None:
    try:
        decode(frames)
        decode(frames, Outer)
    except WireError:
        return
    raise AssertionError("random bytes were a record")


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_flipped_bytes_never_raise_anything_else(data: st.DataObject) -> None:
    header = bytearray(SAMPLE[0])
    for _ in range(data.draw(st.integers(1, 4))):
        header[data.draw(st.integers(0, len(header) - 1))] = data.draw(st.integers(0, 255))
    try:
        assert isinstance(decode([bytes(header), *SAMPLE[1:]], Outer), Outer)
    except WireError:
        return


def test_every_truncation_is_refused() -> None:
    for end in range(len(SAMPLE[0])):
        with pytest.raises(WireError):
            decode([SAMPLE[0][:end], *SAMPLE[1:]])
    for end in (1, len(SAMPLE[1]) - 1):
        with pytest.raises(WireError):
            decode([SAMPLE[0], SAMPLE[1][:end]])
    for frames in ([], SAMPLE[:1], [*SAMPLE, b""], SAMPLE[1:]):
        with pytest.raises(WireError):
            decode(frames)
