"""Whatever is sent arrives the same; whatever else arrives is a WireError."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from slurm_rlhf.control import codec
from slurm_rlhf.control.codec import INLINE_BYTES, decode, encode
from slurm_rlhf.control.declarations import read
from slurm_rlhf.errors import WireError
from slurm_rlhf.records import Experience, Trajectory, VersionSpan, pack

DTYPES = st.one_of(
    hnp.boolean_dtypes(),
    hnp.integer_dtypes(endianness="?"),
    hnp.unsigned_integer_dtypes(),
    hnp.floating_dtypes(endianness="?"),
    hnp.complex_number_dtypes(),
    hnp.datetime64_dtypes(),
    hnp.timedelta64_dtypes(),
    hnp.unicode_string_dtypes(min_len=1, max_len=5),
    hnp.byte_string_dtypes(min_len=1, max_len=5),
)
ARRAYS = hnp.arrays(DTYPES, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(),
    st.text(st.characters(categories=None), max_size=20),
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


@given(DTYPES.filter(lambda dtype: dtype.itemsize > 0), st.integers(0, 99))
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


@pytest.mark.parametrize("order", ["F", "strided", "reversed", "read-only"])
def test_any_memory_layout_travels(order: str) -> None:
    array = np.arange(20_000, dtype=np.int32).reshape(100, 200)
    array = {"F": np.asfortranarray(array), "strided": array[::2, 1::3], "reversed": array[::-1], "read-only": array}[
        order
    ]
    array.flags.writeable = order != "read-only"
    assert same(np.ascontiguousarray(array), decode(encode(array)))


def test_tuples_and_numpy_numbers_arrive_as_plain_ones() -> None:
    sent = {"t": (1, (2.5, "x")), "n": [np.float32(0.5), np.int64(-3), np.bool_(True), np.float64(1e300)]}
    received = decode(encode(sent))
    assert received == {"t": [1, [2.5, "x"]], "n": [0.5, -3, True, 1e300]}
    assert [type(n) for n in received["n"]] == [float, int, bool, float]


def test_records_travel() -> None:
    trajectory = Trajectory(
        7,
        1,
        np.arange(4, dtype=np.int32),
        np.arange(2, dtype=np.int32),
        np.array([-0.5, -1.5], np.float32),
        np.array([True, False]),
        "stop",
        "4\ud800",
        [VersionSpan(0, 2, 3)],
    )
    back = read(Trajectory, decode(encode(trajectory)), "trajectory")
    assert back.versions == trajectory.versions
    assert back.text == trajectory.text
    assert same(trajectory.response_ids, back.response_ids)
    experience = pack([trajectory] * 3000, [1.0] * 3000)
    again = read(Experience, decode(encode(experience)), "experience")
    assert same(vars_of(experience), vars_of(again))


def vars_of(record: Any) -> dict[str, Any]:
    return {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}


CYCLE: list[Any] = []
CYCLE.append(CYCLE)


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (object(), "builtins.object"),
        ({1, 2}, "set"),
        (np.array([object()]), "dtype object"),
        (np.zeros(3, dtype=[("a", "f4")]), "dtype"),
        (np.longdouble(1), "longdouble"),
        (1 << 64, "cannot be sent"),
        ({1.5: 0}, "1.5"),
        ({"a": [{(1, 2): 0}]}, r"\(1, 2\)"),
        ({True: 0}, "True"),
        (CYCLE, "contains itself"),
        (test_records_travel, "function"),
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
    with pytest.raises(WireError, match="4 frames"):
        decode([b"\xc0"] * 4)
    with pytest.raises(WireError, match="header of"):
        decode([bytes(1001)])


def ext(code: int, *content: Any) -> msgpack.ExtType:
    return msgpack.ExtType(code, msgpack.packb(content))


@pytest.mark.parametrize(
    "header",
    [
        ext(1, 0, "|O8", [10]),
        ext(1, 0, "<f4,<f4", [10]),
        ext(1, 0, "(2,)<f4", [10]),
        ext(1, 0, "<f3", [10]),
        ext(1, 0, "<U999999999", [1]),
        ext(1, 0, "<M8[xx]", [10]),
        ext(1, 0, 4, [10]),
        ext(1, 0, "<f8", [11]),
        ext(1, 0, "<f8", [-10, -1]),
        ext(1, 0, "<f8", [2**62, 2**62]),
        ext(1, 0, "<f8", [1] * 40 + [10]),
        ext(1, 0, "<f8", [True, 10]),
        ext(1, 0, "<f8", {"a": 1}),
        ext(1, 1, "<f8", [10]),
        ext(1, -1, "<f8", [10]),
        ext(1, [], "<f8", [10]),
        [ext(1, 0, "<f8", [10])] * 2,
        ext(2, "<f8", [2], "text"),
        ext(2, "<f8", [2], None),
        ext(2, "<U0", [2], b""),
        ext(3, "owner", "key", [1], "<f8"),
        ext(9, 1),
        msgpack.Timestamp(0),
        {1.5: 1},
        {None: 1},
        None,
    ],
    ids=repr,
)
def test_malformed_arrays_are_refused(header: Any) -> None:
    with pytest.raises(WireError):
        decode([msgpack.packb(header), bytes(80)])


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(WireError):
        decode([b"\x91" * 100_000 + b"\xc0"])


SAMPLE = encode({"text": "some text", "small": np.arange(3), "large": np.arange(2000)})


@given(st.lists(st.binary(max_size=200), max_size=4))
@settings(max_examples=300, deadline=None)
def test_random_frames_never_raise_anything_else(frames: list[bytes]) -> None:
    try:
        decode(frames)
    except WireError:
        return
    assert len(frames) == 1


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_flipped_bytes_never_raise_anything_else(data: st.DataObject) -> None:
    header = bytearray(SAMPLE[0])
    for _ in range(data.draw(st.integers(1, 4))):
        header[data.draw(st.integers(0, len(header) - 1))] = data.draw(st.integers(0, 255))
    try:
        decode([bytes(header), *SAMPLE[1:]])
    except WireError:
        return


def test_every_truncation_is_refused() -> None:
    for end in range(len(SAMPLE[0])):
        with pytest.raises(WireError):
            decode([SAMPLE[0][:end], *SAMPLE[1:]])
    for end in (0, 1, len(SAMPLE[1]) - 1):
        with pytest.raises(WireError):
            decode([SAMPLE[0], SAMPLE[1][:end]])
    for frames in ([], SAMPLE[:1], [*SAMPLE, b""], SAMPLE[1:]):
        with pytest.raises(WireError):
            decode(frames)
