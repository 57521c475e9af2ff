"""What the gloo backend does with chunks as they come in, between two ranks in threads."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from slurm_rlhf.weights.backends.gloo import Gloo, GlooTransport
from slurm_rlhf.weights.bucket import Pool, fill, host_checksum, verify
from slurm_rlhf.weights.ends import span_source
from slurm_rlhf.weights.rendezvous import SyncStore, connect
from slurm_rlhf.weights.transfer_plan import Layout, make_plan

PLAN = make_plan(
    [["wide", [3000, 100], "float32"], ["small", [7], "float32"]],
    8 << 20,
    Layout(("a",), ("b",), chunked=True),
    1 << 18,
)
HELD = {
    "wide": (0, torch.arange(300_000, dtype=torch.float32)),
    "small": (0, torch.arange(7, dtype=torch.float32)),
}


@pytest.fixture
def ends() -> Iterator[tuple[Gloo, Gloo]]:
    store = SyncStore.listen("127.0.0.1", 30.0)
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
