"""Buckets: how they are filled and emptied, and what is asked of weights that arrive."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sync_peer import describe, hold
from xxhash import xxh3_64_intdigest

from slurm_rlhf.errors import SyncError
from slurm_rlhf.weights.backends.gloo import Gloo, GlooTransport
from slurm_rlhf.weights.bucket import Assembly, Pool, _in_words, checksum, fill, host_checksum, verify
from slurm_rlhf.weights.ends import span_source
from slurm_rlhf.weights.rendezvous import connect, listen
from slurm_rlhf.weights.routes import routes
from slurm_rlhf.weights.transfer_plan import TransferLayout, make_plan

POOL = Pool(torch.device("cpu"))


def _random_bytes(n: int) -> torch.Tensor:
    return torch.randint(0, 256, (n,), dtype=torch.uint8, generator=torch.Generator().manual_seed(n))


def _odd_words(count: int) -> np.ndarray:
    golden = np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        mixed = (np.arange(1, count + 1, dtype=np.int64).view(np.uint64) * golden).view(np.int64)
        return ((mixed ^ (mixed >> 29)).view(np.uint64) * golden) | np.uint64(1)


@pytest.fixture(params=["host", "device"])
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose checksum is taken; a device's works on a host just as well."""
    monkeypatch.setattr("slurm_rlhf.weights.bucket._is_cpu", lambda tensor: request.param == "host")


@pytest.mark.parametrize("lanes", [5, 1 << 15, (2 << 15) + 5, (1 << 20) + 3])
def test_the_checksum_of_a_device_is_the_weighted_sum_it_says(lanes: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("slurm_rlhf.weights.bucket._is_cpu", lambda tensor: False)
    data = _random_bytes(8 * lanes)
    words = data.numpy().view(np.uint64)
    with np.errstate(over="ignore"):
        weights, total = _odd_words(1 << 20), np.uint64(0)
        for low in range(0, lanes, 1 << 20):
            block = words[low : low + (1 << 20)]
            total = total * np.uint64(0x9E3779B97F4A7C15) + (block * weights[: len(block)]).sum(dtype=np.uint64)
    assert checksum(data).item() == np.asarray(total).view(np.int64)


@pytest.mark.parametrize("nbytes", [0, 1, 77, (1 << 20) - 1, (3 << 20) + 5])
def test_the_checksum_of_a_host_is_that_of_the_library(nbytes: int):
    data = _random_bytes(nbytes)
    assert checksum(data).item() == int(np.uint64(xxh3_64_intdigest(data.numpy().tobytes())).view(np.int64))


@pytest.mark.parametrize("lanes", [0, 5, 1 << 15, 1 << 16, (1 << 17) + 77])
def test_checksum_of_a_copy_is_that_of_the_bytes(lanes, where):
    data, copy = _random_bytes(8 * lanes), torch.zeros(8 * lanes, dtype=torch.uint8)
    assert checksum(data, into=copy).item() == checksum(data).item()
    assert torch.equal(copy, data)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(2, 9000), st.data())
def test_checksum_sees_a_flipped_bit_a_shift_and_an_exchange(where, lanes, draw):
    data = _random_bytes(8 * lanes)
    here, there = draw.draw(st.integers(0, lanes - 2)), lanes - 1
    flipped = data.clone()
    flipped[8 * here] ^= 1 << draw.draw(st.integers(0, 7))
    exchanged = data.clone().view(torch.int64)
    exchanged[here], exchanged[there] = exchanged[there].item(), exchanged[here].item()
    changed = [flipped, exchanged.view(torch.uint8), data.roll(8)]
    assert checksum(data).item() not in [checksum(other).item() for other in changed]


def _weights() -> list[tuple[str, torch.Tensor]]:
    torch.manual_seed(0)
    return [
        ("fp32", torch.randn(7, 5)),
        ("bf16", torch.randn(33).bfloat16()),
        ("half", torch.randn(6, 4).half()),
        ("scalar", torch.tensor(3.5)),
        ("none", torch.zeros(0, 4)),
        ("large", torch.randn(90, 10)),
    ]


def _plan(actors: int = 1, zero: int = 0, bucket: int = 1 << 20, chunked: bool = False):
    return make_plan(describe(_weights()), bucket, TransferLayout(("a",) * actors, ("b",), zero, chunked=chunked))


def _filled(plan, bucket: int, version: int) -> torch.Tensor:
    """The bucket as its owners would send it."""
    actors = len(plan.layout.actors)
    cut = actors if plan.layout.zero_stage == 3 else 1
    buffer = torch.randint(0, 256, (plan.nbytes(bucket, 0),), dtype=torch.uint8)
    for part in plan.parts(bucket, 0):
        source = span_source(plan, hold(_weights(), part.owner if cut > 1 else 0, cut))
        apart = fill(buffer[part.start : part.start + part.nbytes], part, bucket, version, source, POOL)
        for piece, data in zip(part.apart, apart, strict=True):
            buffer[piece.offset : piece.offset + piece.span.nbytes] = data
    return buffer


@pytest.mark.parametrize(("actors", "zero"), [(1, 0), (3, 2), (1, 3), (4, 3)])
@pytest.mark.parametrize("bucket", [64, 320, 1 << 20])
@pytest.mark.parametrize("way", ["parameters", "copies"])
@pytest.mark.parametrize("chunked", [False, True])
def test_what_is_filled_is_what_is_put_together(actors, zero, bucket, way, chunked, monkeypatch):
    monkeypatch.setattr("slurm_rlhf.weights.transfer_plan._APART", 48)
    plan = _plan(actors, zero, bucket, chunked)
    assembly = Assembly(plan, Pool(torch.device("cpu")))
    got = []
    for index in range(len(plan.buckets)):
        buffer = _filled(plan, index, 12)
        got += list(getattr(assembly, way)(buffer, plan.parts(index, 0), index, 12))
    for (name, tensor), (expected, sent) in zip(got, _weights(), strict=True):
        assert name == expected
        assert tensor.dtype == sent.dtype
        assert torch.equal(tensor, sent)


def test_shards_that_lie_apart_arrive_as_their_parameter(monkeypatch):
    """Nothing is copied, on neither end; parameters that are small travel in the parts."""
    monkeypatch.setattr("slurm_rlhf.weights.transfer_plan._APART", 48)
    plan = _plan(3, 3, chunked=True)
    buffer = _filled(plan, 0, 12)
    parts = plan.parts(0, 0)
    large = {plan.parameters[piece.span.parameter].name for part in parts for piece in part.apart}
    assert large == {"fp32", "large"}
    pool = Pool(torch.device("cpu"))
    got = dict(Assembly(plan, pool).parameters(buffer, parts, 0, 12))
    inside = {
        name: buffer.data_ptr() <= tensor.data_ptr() < buffer.data_ptr() + buffer.numel()
        for name, tensor in got.items()
        if tensor.numel()
    }
    assert {name for name, lies in inside.items() if lies} >= large
    held = hold(_weights(), 1, 3)
    sent = fill(torch.empty(parts[1].nbytes, dtype=torch.uint8), parts[1], 0, 12, span_source(plan, held), POOL)
    assert [data.data_ptr() for data in sent] == [held[name][1].data_ptr() for name in ("fp32", "large")]


def test_a_wrong_byte_and_a_wrong_version_are_named():
    plan = _plan(2, 3)
    buffer = _filled(plan, 0, 12)
    first, second = plan.parts(0, 0)
    with pytest.raises(SyncError, match="bucket 0 of policy version 13, got bucket 0 of version 12 from actor 1"):
        verify(buffer, plan, [second], 0, 13)
    buffer[second.pieces[1].offset + 3] += 1
    verify(buffer, plan, [first], 0, 12)
    assembly = Assembly(plan, Pool(torch.device("cpu")))
    for way in (assembly.parameters, assembly.copies):
        with pytest.raises(SyncError, match="differs from that of actor 1 in bf16 "):
            list(way(buffer, (first, second), 0, 12))


def test_what_was_summed_on_arrival_is_compared_and_not_read_again(monkeypatch):
    """Pieces of a large parameter are no larger than a chunk; whoever takes a chunk sums it."""
    monkeypatch.setattr("slurm_rlhf.weights.transfer_plan._APART", 70)
    plan = make_plan(describe(_weights()), 1 << 20, TransferLayout(("a", "a"), ("b",), 3, chunked=True), 64)
    buffer, parts = _filled(plan, 0, 12), plan.parts(0, 0)
    apart = [piece for part in parts for piece in part.apart]
    assert {(piece.offset, piece.offset + piece.span.nbytes) for piece in apart} == {
        (route.low, route.high) for route in routes(plan, 0, 0) if route.high <= parts[0].start
    }
    known = {piece.offset: int(checksum(buffer[piece.offset : piece.offset + piece.span.nbytes])) for piece in apart}
    buffer[apart[-1].offset] += 1  # nobody looks there any more
    verify(buffer, plan, parts, 0, 12, known)
    known[apart[1].offset] += 1
    with pytest.raises(SyncError, match="differs from that of actor 0 in fp32 "):
        verify(buffer, plan, parts, 0, 12, known)


def test_parameters_that_are_not_the_plan():
    plan = _plan()
    held = hold(_weights())
    with pytest.raises(SyncError, match="no parameter 'bf16', which is in the plan"):
        span_source(plan, {name: part for name, part in held.items() if name != "bf16"})
    source = span_source(plan, {**held, "fp32": (10, torch.zeros(25))})
    with pytest.raises(SyncError, match="holds elements 10 to 35 of 'fp32', the plan wants 0 to 35 of 35"):
        source(plan.buckets[0][0])


def test_bytes_are_words_where_their_place_and_their_number_are():
    data = _random_bytes(24)
    assert [_in_words(data[first:last]) for first, last in ((0, 16), (8, 24), (1, 17), (8, 17))] == [
        True,
        True,
        False,
        False,
    ]


def test_memory_is_used_again_when_the_last_view_of_it_is_gone():
    pool = Pool(torch.device("cpu"))
    first = pool.take(1000)
    kept = first[100:200].view(torch.float32)
    address = first.data_ptr()
    del first
    second = pool.take(1000)
    assert second.data_ptr() != address
    kept.fill_(1.0)
    larger = pool.take(1500)
    del kept, larger
    assert pool.take(900).data_ptr() == address  # the smallest that fits
    assert pool.peak == 3500


def test_idle_memory_counts_as_held():
    pool = Pool(torch.device("cpu"), others=70)
    for nbytes in (1000, 5000, 100):  # none of them fits where another was
        pool.take(nbytes)
    assert pool.peak == 70 + 6100
    pool.take(5000)
    assert pool.peak == 70 + 6100


# --- arrival ----------------------------------------------------------------------------------------------------------


PLAN = make_plan(
    [["wide", [3000, 100], "float32"], ["small", [7], "float32"]],
    8 << 20,
    TransferLayout(("a",), ("b",), chunked=True),
    1 << 18,
)
HELD = {
    "wide": (0, torch.arange(300_000, dtype=torch.float32)),
    "small": (0, torch.arange(7, dtype=torch.float32)),
}


@pytest.fixture
def ends() -> Iterator[tuple[Gloo, Gloo]]:
    store = listen("127.0.0.1", 30.0)
    places = [connect("127.0.0.1", store.port, "group", 30.0, 10.0) for _ in range(2)]
    with ThreadPoolExecutor(2) as threads:
        made = list(threads.map(lambda r: Gloo(PLAN, r, GlooTransport(places[r], r, 2, "127.0.0.1", 30.0)), range(2)))
    yield made[0], made[1]
    for end in made:
        end.abort()
        end.close()


def test_each_chunk_of_a_large_parameter_is_summed_as_it_comes(ends: tuple[Gloo, Gloo]) -> None:
    """The bytes are in the processor's cache then; the thread that loads them need not read them all once more."""
    giver, taker = ends
    (part,) = PLAN.parts(0, 0)
    incoming = taker.receive(0)
    buffer = torch.empty(part.nbytes, dtype=torch.uint8)
    apart = fill(buffer, part, 0, 1, span_source(PLAN, HELD), Pool(torch.device("cpu")))
    giver.send(0, 0, part, buffer, apart).wait()
    arrived = incoming.wait()
    assert len(part.apart) == 5
    assert incoming.sums == {piece.offset: host_checksum(data) for piece, data in zip(part.apart, apart, strict=True)}
    verify(arrived, PLAN, (part,), 0, 1, incoming.sums)
    assert torch.equal(arrived[:1_200_000].view(torch.float32), HELD["wide"][1])
    giver.flush()
    taker.flush()
