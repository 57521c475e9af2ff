"""Engines of several TP ranks: the same tokens as one rank gives, alone in their failures, stopped when they differ."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import psutil
import pytest
from msgspec.structs import replace
from ranks import RolloutFleet, config
from tiny_models import make_tiny
from waiting import HANG_S, scaled

from slurm_rlhf.cluster import local_directory
from slurm_rlhf.engine.tp_engine import SHARED_MEMORY, EnginePlace
from slurm_rlhf.errors import RemoteError, RunError
from slurm_rlhf.ranks.engine_follower import segment_prefix
from slurm_rlhf.records import KV_CACHE, WEIGHTS, Prompt, Sampling, Trajectory
from slurm_rlhf.sampling.episodes import Episodes
from slurm_rlhf.sampling.scheduler import Scheduler, Waves
from slurm_rlhf.wire.calls import (
    Asked,
    EngineCalls,
    GenerateAnswer,
    GenerateBatch,
    PackedPrompts,
    WakeUpRequest,
)
from slurm_rlhf.wire.handles import gather

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SAMPLING = Sampling(max_new_tokens=24, temperature=0.9, n=3)
WIDTH = 16
KINDS = ("reversed", "unseeded", "uneven")
"""Faults of the followers in tests/support/rollout_misfits.py, one kind for each engine."""

SUPPORT = Path(__file__).parents[1] / "support"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("model") / "qwen2", hidden=128, heads=4, kv_heads=2)


@pytest.fixture(scope="module")
def launched(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RolloutFleet]:
    """Processes of `single`, which come up while those of `pair` do."""
    made = config(model, tmp_path_factory.mktemp("single"), engines=2)
    made.train.kernel_cache = str(tmp_path_factory.mktemp("kernels"))
    fleet = RolloutFleet(made)
    fleet.launch()
    fleet.engines.ready = [0]
    yield fleet
    fleet.close()


@pytest.fixture(scope="module")
def single(launched: RolloutFleet) -> RolloutFleet:
    """An engine of one rank, and another one that is not asked but where a test wants both."""
    launched.start()
    return launched


@pytest.fixture(scope="module")
def pair(launched: RolloutFleet, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RolloutFleet]:
    """Two engines of two ranks each."""
    made = config(model, tmp_path_factory.mktemp("pair"), engines=2, tp=2)
    made.vllm.enable_prefix_caching = False  # a cached prompt has other last bits
    fleet = RolloutFleet(made)
    try:
        fleet.start()
        yield fleet
    finally:
        fleet.close()


def prompts(count: int) -> list[Prompt]:
    rng = np.random.default_rng(0)
    return [Prompt(i, "", rng.integers(2, 60, 3 + 17 * i % 60).astype(np.int32)) for i in range(count)]


def ask(
    fleet: RolloutFleet, engine: int, asked: list[Prompt], how: Sampling, version: int = 0
) -> Future[GenerateAnswer]:
    """Have one engine sample, by a call of its own."""
    most = how.max_new_tokens
    rows = [Asked(how.n * p.index + k, p.index, k, version, 0, most, p.token_ids) for p in asked for k in range(how.n)]
    batch = GenerateBatch(PackedPrompts.pack(rows), how, 1, len(rows))
    return fleet.engines.call(engine, EngineCalls.generate, batch)


def generate(fleet: RolloutFleet, count: int, version: int, how: Sampling = SAMPLING) -> list[Trajectory]:
    return Episodes(Waves(fleet.engines, 1, WIDTH)).sample(prompts(count), how, version)


def bits(trajectories: list[Trajectory]) -> list[tuple[int, bytes, bytes]]:
    return [(t.engine, t.response_ids.tobytes(), t.rollout_logprobs.tobytes()) for t in trajectories]


def test_same_tokens_for_any_number_of_engines_and_ranks(pair: RolloutFleet, single: RolloutFleet) -> None:
    wide, again, narrow = generate(pair, 10, 1), generate(pair, 10, 1), generate(single, 10, 1)
    assert bits(wide) == bits(again)
    assert {t.engine for t in wide} == {0, 1}
    assert [t.response_ids.tolist() for t in wide] == [t.response_ids.tolist() for t in narrow]
    for one, other in zip(wide, narrow, strict=True):
        assert np.abs(one.rollout_logprobs - other.rollout_logprobs).max() < 1e-5
    assert [t.response_ids.tolist() for t in generate(pair, 10, 2)] != [t.response_ids.tolist() for t in wide]


def test_four_ranks_give_the_same_tokens(single: RolloutFleet, model: Path, tmp_path: Path) -> None:
    """More ranks than key-value heads, and several followers to keep together."""
    fleet = RolloutFleet(config(model, tmp_path / "four", tp=4))
    try:
        fleet.start()
        wide, narrow = generate(fleet, 4, 1), generate(single, 4, 1)
        assert [t.response_ids.tolist() for t in wide] == [t.response_ids.tolist() for t in narrow]
        for one, other in zip(wide, narrow, strict=True):
            assert np.abs(one.rollout_logprobs - other.rollout_logprobs).max() < 1e-5
        fleet.kill(2)
        fleet.ended([0, 1, 3])
        [(rank, event, data)] = fleet.events
        assert (rank, event) == (0, "failure")
        assert "engine 0 (rollout ranks 0 to 3 on" in data["reason"]
        assert "its rank 2 died" in data["reason"]
    finally:
        fleet.close()


@pytest.mark.parametrize("ranks", ["single", "pair"])
def test_a_call_that_fails_leaves_no_request_behind(request: pytest.FixtureRequest, ranks: str) -> None:
    """The first prompts were taken when the last one was refused: on no rank are they in the way of the next call."""
    fleet: RolloutFleet = request.getfixturevalue(ranks)
    before = [t.response_ids.tolist() for t in generate(fleet, 4, 1)]
    asked = [*prompts(4), Prompt(4, "", np.full(400, 5, np.int32))]
    for _ in range(2):
        with pytest.raises(RemoteError, match=r"refuses request '12' \(prompt 4, 400 tokens\)"):
            ask(fleet, 0, asked, SAMPLING, version=1).result(timeout=HANG_S)
    assert [t.response_ids.tolist() for t in generate(fleet, 4, 1)] == before


def test_a_response_that_repeats_itself_ends_on_all_ranks(pair: RolloutFleet, single: RolloutFleet) -> None:
    """Each rank's scheduler looks for it; one that did not would go its own way, which the digests tell."""
    how = replace(SAMPLING, temperature=0.0, max_new_tokens=40, max_pattern_size=4, min_count=3)
    runs = [[(t.finish_reason, t.response_ids.tolist()) for t in generate(f, 6, 1, how)] for f in (pair, single)]
    assert runs[0] == runs[1]
    assert "repetition" in dict(runs[0])
    assert pair.events == []


def test_two_batches_in_flight_keep_the_ranks_in_step(single: RolloutFleet, model: Path) -> None:
    """Asynchronous scheduling on each of two ranks: with stop strings, calls that overlap, and sleep in between."""
    directory = Path(single.config.run_dir).with_name("async")
    fleet = RolloutFleet(config(model, directory, tp=2), str(SUPPORT / "rollout_async.py"))
    try:
        fleet.launch()
        (start,) = gather(fleet.starting())
        assert "asynchronous scheduling" in start.note
        plain = generate(single, 10, 1)
        assert [t.response_ids.tolist() for t in generate(fleet, 10, 1)] == [t.response_ids.tolist() for t in plain]
        how = replace(SAMPLING, stop=[max((t.text for t in plain), key=len)[6:9]])
        wide, narrow = (Episodes(Scheduler(f.engines, 1, WIDTH)).sample(prompts(10), how, 1) for f in (fleet, single))
        assert [t.response_ids.tolist() for t in wide] == [t.response_ids.tolist() for t in narrow]
        assert any(len(cut.response_ids) < len(t.response_ids) for cut, t in zip(wide, plain, strict=True))
        assert_sleeps_as_one(fleet)
        assert fleet.events == []
        assert fleet.shut_down() == [0, 0]
    finally:
        fleet.close()


def test_each_rank_keeps_what_it_compiles_in_a_directory_of_its_own(pair: RolloutFleet, single: RolloutFleet) -> None:
    slots = sorted(Path(single.config.train.kernel_cache).glob("slurm_rlhf_kernels.*/*/rollout.*"))
    assert [slot.name for slot in slots] == ["rollout.0", "rollout.1"]
    for rank, slot in enumerate(slots):
        assert f"compiled kernels are kept in {slot}" in single.log(rank)
        assert not (slot / ".starting").exists()  # the start is over: its compiled kernels are whole
        assert local_directory._try_lock(slot) is None  # while it lives


def test_an_idle_engine_waits_and_does_not_look_again_and_again(pair: RolloutFleet) -> None:
    """A rank that polls or spins is switched away from or runs on; one that waits for a message does neither."""
    generate(pair, 4, 3)
    time.sleep(0.5)
    before = [psutil.Process(rank.pid).num_ctx_switches().voluntary for rank in pair.ranks.values()]
    states = []
    for _ in range(40):
        time.sleep(0.05)
        states += [psutil.Process(rank.pid).status() for rank in pair.ranks.values()]
    after = [psutil.Process(rank.pid).num_ctx_switches().voluntary for rank in pair.ranks.values()]
    assert states.count(psutil.STATUS_RUNNING) < 0.1 * len(states)
    assert all(now - then < 20 for then, now in zip(before, after, strict=True)), (before, after)  # main threads


def test_no_name_of_shared_memory_outlives_the_start(pair: RolloutFleet) -> None:
    for engine in (0, 1):
        prefix = segment_prefix(pair.config, EnginePlace(engine, 0, 2, ""))
        assert not list(SHARED_MEMORY.glob(f"{prefix}*"))


def test_an_engine_fails_alone_and_by_name(pair: RolloutFleet) -> None:
    """A follower is killed while its leader is inside a step: the engine ends, the other one goes on."""
    how = Sampling(max_new_tokens=100, n=2)
    doomed, safe = (ask(pair, engine, prompts(40), how) for engine in (0, 1))
    time.sleep(0.5)
    pair.kill(1)
    pair.ended([0])
    [(rank, event, data)] = pair.events
    assert (rank, event) == (0, "failure")
    assert "engine 0 (rollout ranks 0 to 1 on" in data["reason"]
    assert "its rank 1 died" in data["reason"]
    assert data["reason"] in pair.log(0)
    pair.server.give_up("rollout", 0, "its engine has ended")
    with pytest.raises(RunError):
        doomed.result(HANG_S)
    assert len(safe.result(timeout=HANG_S).found) == 2 * 40
    assert pair.ranks[2].poll() is pair.ranks[3].poll() is None


def test_followers_leave_with_their_leader(pair: RolloutFleet) -> None:
    pair.kill(2)
    pair.ended([3])
    assert "engine 1 (rollout ranks 2 to 3 on" in pair.log(3)
    assert "its leader, rank 2, is gone" in pair.log(3)


def test_what_keeps_an_engine_from_starting_is_reported(model: Path, tmp_path: Path) -> None:
    """A model that no rank can load is the user's to mend; a rank that does not come is named."""
    bad = tmp_path / "bad"
    shutil.copytree(model, bad)
    settings = json.loads((bad / "config.json").read_text())
    (bad / "config.json").write_text(json.dumps(settings | {"architectures": ["NoSuchLM"]}))
    wrong = RolloutFleet(config(bad, tmp_path / "wrong", tp=2))
    made = config(model, tmp_path / "alone", tp=2)
    made.timeout.connect = scaled(5.0)
    alone = RolloutFleet(made)
    try:
        wrong.launch()
        alone.launch([0])
        alone.server.wait_for("rollout", 1, HANG_S)
        with pytest.raises(RemoteError, match=r"engine 0 \(rollout ranks 0 to 1 on .*TP rank \[1\] did not connect"):
            alone.engines.call(0, EngineCalls.start, 1).result(timeout=HANG_S)
        wrong.server.wait_for("rollout", 2, HANG_S)
        with pytest.raises(RemoteError, match="vLLM does not accept the model") as caught:
            wrong.engines.call(0, EngineCalls.start, 1).result(timeout=HANG_S)
        assert caught.value.user_error
    finally:
        wrong.close()
        alone.close()


def test_an_engine_starts_again_where_a_killed_one_was(pair: RolloutFleet, single: RolloutFleet) -> None:
    """Even where that one left its shared memory behind; and it ends as it should when it is asked to."""
    single_tokens = [t.response_ids.tolist() for t in generate(single, 4, 1)]
    pair.close()
    left = SHARED_MEMORY / f"{segment_prefix(pair.config, EnginePlace(0, 0, 2, ''))}0123-tp:0-[0-1]-cpushm_0"
    left.write_bytes(b"of an engine that was killed while it started")
    fleet = RolloutFleet(pair.config)
    try:
        fleet.launch([0, 1])
        fleet.server.wait_for("rollout", 2, HANG_S)
        fleet.engines.call(0, EngineCalls.start, 1).result(timeout=HANG_S)
        fleet.engines.ready = [0]
        assert not left.exists()
        assert [t.response_ids.tolist() for t in generate(fleet, 4, 1)] == single_tokens
        assert_sleeps_as_one(fleet)
        assert fleet.shut_down() == [0, 0]
    finally:
        fleet.close()


def assert_sleeps_as_one(fleet: RolloutFleet) -> None:
    """Each rank of engine 0 passes every word on to its vLLM, in the same order, and drops the same requests."""
    dropped = ask(fleet, 0, prompts(40), Sampling(max_new_tokens=200, n=2))
    assert fleet.engines.call(0, EngineCalls.sleep).result(timeout=HANG_S) == 0
    with pytest.raises(RemoteError, match=r"engine 0 .* had to drop its requests"):
        dropped.result(timeout=HANG_S)
    for part in (WEIGHTS, KV_CACHE):
        fleet.engines.call(0, EngineCalls.wake_up, WakeUpRequest(part)).result(timeout=HANG_S)
    with pytest.raises(RemoteError, match="no update came since"):
        ask(fleet, 0, prompts(1), SAMPLING).result(timeout=HANG_S)
    ignored = r"cpu_worker\.py:(\d+)\] sleep mode is not supported on CPU"
    lines = [re.findall(ignored, fleet.log(rank)) for rank in (0, 1)]
    assert lines[0] == lines[1]
    asleep, *awake = lines[0]
    assert awake == [awake[0]] * 2
    assert asleep != awake[0]


@pytest.fixture(scope="module")
def misfits(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RolloutFleet]:
    """One engine of two ranks for each kind of misbehaviour of a follower."""
    settings = config(model, tmp_path_factory.mktemp("misfits"), engines=len(KINDS), tp=2)
    made = RolloutFleet(settings, str(SUPPORT / "rollout_misfits.py"))
    try:
        made.launch(MISFIT=",".join(KINDS))
        made.start()
        yield made
    finally:
        made.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_follower_that_goes_its_own_way_stops_its_engine(misfits: RolloutFleet, kind: str) -> None:
    """It is stopped in seconds, by name, and hands out no response."""
    engine = KINDS.index(kind)
    rng = np.random.default_rng(0)
    asked = [Prompt(i, "", rng.integers(2, 60, 5 + 3 * i).astype(np.int32)) for i in range(6)]
    answer = ask(misfits, engine, asked, Sampling(max_new_tokens=24))
    misfits.ended([2 * engine])
    [reason] = [data["reason"] for rank, _, data in misfits.events if rank == 2 * engine]
    assert f"engine {engine} (rollout ranks {2 * engine} to {2 * engine + 1} on" in reason
    assert f"rollout ranks {2 * engine} and {2 * engine + 1} (TP ranks 0 and 1) did not do the same" in reason
    # The main thread says so, too, unless it hangs in the collective that the other rank does not join.
    misfits.server.give_up("rollout", 2 * engine, "its engine has ended")
    with pytest.raises(RunError):
        answer.result(HANG_S)
    misfits.ended([2 * engine + 1])
