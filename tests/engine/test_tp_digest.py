"""The digest that TP ranks compare: other work, or another order, changes it. And an engine's ranks and GPUs."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import pytest

from slurm_rlhf.engine.engine import GenerateRequest
from slurm_rlhf.engine.tp_engine import EnginePlace, TpDigest
from slurm_rlhf.ranks.engine_follower import own_devices
from slurm_rlhf.records import Sampling
from slurm_rlhf.wire.codec import decode, encode


def request(key: str, seed: int = 1, ids: tuple[int, ...] = (5, 6)) -> GenerateRequest:
    return GenerateRequest(key, 1, 2, np.array(ids, dtype=np.int32), Sampling(stop=["x"]), seed)


STEPS: tuple[Callable[[TpDigest], object], ...] = (
    lambda done: done.added(request("a")),
    lambda done: done.added(request("b")),
    lambda done: done.planned({"a": 2, "b": 2}),
    lambda done: done.sampled("a", [7]),
    lambda done: done.sampled("b", [8]),
    lambda done: done.loaded(3),
)
OTHERWISE: tuple[Callable[[TpDigest], object], ...] = (
    lambda done: done.added(request("a", seed=2)),
    lambda done: done.added(request("b", ids=(5, 7))),
    lambda done: done.planned({"b": 2, "a": 2}),
    lambda done: done.sampled("a", [7, 7]),
    lambda done: done.sampled("c", [8]),
    lambda done: done.loaded(4),
)


def digest(*steps: Callable[[TpDigest], object]) -> bytes:
    done = TpDigest()
    for step in steps:
        step(done)
    return done.digest()


def test_every_difference_shows() -> None:
    assert digest(*STEPS) == digest(*STEPS)
    seen = {digest(*STEPS)}
    for place, other in enumerate(OTHERWISE):
        seen.add(digest(*STEPS[:place], other, *STEPS[place + 1 :]))
        seen.add(digest(*STEPS[:place], *STEPS[place + 1 :]))
    for place in range(len(STEPS) - 1):
        seen.add(digest(*STEPS[:place], STEPS[place + 1], STEPS[place], *STEPS[place + 2 :]))
    assert len(seen) == 1 + 2 * len(STEPS) + len(STEPS) - 1


def test_a_request_travels_whole() -> None:
    sent = request("a", 9, (1, 2, 3))
    got = decode(encode(sent), GenerateRequest)
    assert got.prompt_ids.tolist() == sent.prompt_ids.tolist()
    assert (got.key, got.prompt, got.sample, got.sampling, got.seed) == ("a", 1, 2, sent.sampling, 9)


def test_places() -> None:
    places = [EnginePlace(*divmod(rank, 4), 4, "n1") for rank in range(12)]
    assert [(place.engine, place.tp_rank) for place in places] == [divmod(rank, 4) for rank in range(12)]
    assert [places[5].rank(tp_rank) for tp_rank in range(4)] == [4, 5, 6, 7]
    assert str(places[5]) == "engine 1 (rollout ranks 4 to 7 on n1)"
    assert str(EnginePlace(3, 0, 1, "n2")) == "engine 3 (rollout rank 3 on n2)"


@pytest.mark.parametrize(
    ("local_rank", "tp", "visible", "own"),
    [(0, 1, "4,5", "4"), (1, 1, "4,5", "5"), (3, 2, "0,1,6,7", "6,7"), (2, 4, "a,b,c,d", "a,b,c,d"), (0, 2, "", "")],
)
def test_an_engine_sees_its_own_gpus(
    monkeypatch: pytest.MonkeyPatch, local_rank: int, tp: int, visible: str, own: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    own_devices(local_rank, tp)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == own
