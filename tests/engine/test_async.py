"""Two batches in flight: the same tokens, and nothing of an old policy or of an ended request is left in them."""

from __future__ import annotations

from pathlib import Path

import pytest
import rollout_engine as child
from msgspec.structs import replace
from rollout_engine import EngineProcess
from tiny_models import make_tiny

from slurm_rlhf.errors import RunError
from slurm_rlhf.records import Sampling, Trajectory, VersionSpan

SAMPLING = Sampling(max_new_tokens=24, temperature=0.9)


def stated(trajectories: list[Trajectory]) -> list[tuple[list[int], bytes, str, str]]:
    return [(t.response_ids.tolist(), t.rollout_logprobs.tobytes(), t.text, t.finish_reason) for t in trajectories]


def stopping(trajectories: list[Trajectory]) -> Sampling:
    """Stop at a string in the middle of the longest text."""
    return replace(SAMPLING, stop=[max((t.text for t in trajectories), key=len)[6:9]])


@pytest.fixture(scope="module")
def expected() -> dict[str, list[Trajectory]]:
    """Responses that the engine samples with one batch at a time; `process` fills them in."""
    return {}


@pytest.fixture(scope="module")
def process(
    engine_process: EngineProcess, tmp_path_factory: pytest.TempPathFactory, expected: dict[str, list[Trajectory]]
) -> EngineProcess:
    """An engine with asynchronous scheduling; before it, one without was asked for `expected`."""
    path = make_tiny(tmp_path_factory.mktemp("model") / "qwen2", "qwen2", heads=2, kv_heads=1)
    engine_process.run(child.start, path)
    assert engine_process.run(child.isolation)["in_flight"] == 1
    expected["plain"] = engine_process.run(child.generate, child.requests(SAMPLING, samples=3))
    expected["stopped"] = engine_process.run(child.generate, child.requests(stopping(expected["plain"]), samples=3))
    engine_process.run(child.start, path, "fp32", 0, True)
    return engine_process


@pytest.fixture
def engine(process: EngineProcess) -> EngineProcess:
    """Give the engine policy 0, the directory's weights, and an empty prefix cache."""
    process.run(child.update, 0)
    return process


def test_the_same_bits_as_with_one_batch_at_a_time(
    engine: EngineProcess, expected: dict[str, list[Trajectory]]
) -> None:
    assert engine.run(child.isolation)["in_flight"] == 2
    done = engine.run(child.generate, child.requests(SAMPLING, samples=3))
    assert stated(done) == stated(expected["plain"])
    assert engine.run(child.queue) == []  # the last request took its batch home


def test_a_stop_string_ends_a_request_that_is_in_a_batch_in_flight(
    engine: EngineProcess, expected: dict[str, list[Trajectory]]
) -> None:
    sampling = stopping(expected["plain"])
    for _ in range(2):  # nothing that the first ones left behind reaches the second ones, of the same keys
        engine.run(child.update, 0)
        done = engine.run(child.generate, child.requests(sampling, samples=3))
        assert stated(done) == stated(expected["stopped"])
        assert engine.run(child.queue) == []
    assert any(len(a.response_ids) < len(b.response_ids) for a, b in zip(done, expected["plain"], strict=True))


def test_a_key_is_free_while_a_batch_in_flight_still_holds_it(engine: EngineProcess) -> None:
    """The next request of that name gets nothing of what is sampled there."""
    first, other = child.requests(replace(SAMPLING, max_new_tokens=20, temperature=1.0))[1:3]
    alone = engine.run(child.generate, [other])[0]
    stop = replace(first.sampling, stop=list("0123456789abcdefghijklmnopqrstuvwxyz "))
    engine.run(child.update, 0)
    engine.run(child.do, "add", other)
    engine.run(child.do, "add", replace(first, sampling=stop))
    landed: list[Trajectory] = []
    while not landed:
        landed = engine.run(child.do, "step")
    assert [(t.prompt, t.finish_reason) for t in landed] == [(first.prompt, "stop")]
    assert any(engine.run(child.queue, first.key))
    engine.run(child.do, "add", replace(other, key=first.key, prompt=first.prompt))
    again, same = sorted(engine.run(child.generate, []), key=lambda t: t.prompt)
    assert again.response_ids.tolist() == same.response_ids.tolist() == alone.response_ids.tolist()


def test_no_token_of_an_old_policy_comes_under_a_new_one(engine: EngineProcess) -> None:
    """The batch in flight is read before the weights change, and what ended in it is handed out all the same."""
    wanted = child.requests(SAMPLING, samples=2)
    mixed = engine.run(child.generate, wanted, 6, 1)
    assert len(mixed) == len(wanted)
    for t in mixed:
        length = len(t.response_ids)
        # After six calls five batches have been read and one is in flight.
        assert t.versions == (
            [VersionSpan(0, 6, 0), VersionSpan(6, length, 1)] if length > 6 else [VersionSpan(0, length, 0)]
        )
    assert any(len(t.versions) == 2 for t in mixed)
    assert max(engine.run(child.differences, mixed, [0, 1], SAMPLING.temperature)) < 1e-5
    assert engine.run(child.differences, mixed, [0], SAMPLING.temperature)[0] > 0.1


def test_it_sleeps_with_nothing_in_flight(engine: EngineProcess, expected: dict[str, list[Trajectory]]) -> None:
    wanted = child.requests(SAMPLING, samples=3)
    for request in wanted:
        engine.run(child.do, "add", request)
    for _ in range(3):
        engine.run(child.do, "step")
    assert engine.run(child.queue) == [True]
    engine.run(child.do, "sleep")
    assert engine.run(child.queue) == []
    engine.run(child.do, "wake", "weights")
    engine.run(child.update, 0)
    engine.run(child.do, "wake", "kv_cache")
    assert stated(engine.run(child.generate, wanted)) == stated(expected["plain"])


@pytest.mark.parametrize("where", ["model", "text"])
def test_a_step_that_fails_has_dropped_its_requests(
    engine: EngineProcess, expected: dict[str, list[Trajectory]], where: str
) -> None:
    """Their keys are free again, and nothing of them comes with what is asked for next."""
    wanted = child.requests(SAMPLING, samples=3)
    for request in wanted:
        engine.run(child.do, "add", request)
    for _ in range(2):
        engine.run(child.do, "step")
    assert engine.run(child.fail_once, where) == f"no {where}"
    assert engine.run(child.queue) == []
    assert engine.run(child.generate, []) == []
    engine.run(child.update, 0)
    assert stated(engine.run(child.generate, wanted)) == stated(expected["plain"])


def test_an_engine_without_weights_drops_what_it_is_asked_for(engine: EngineProcess) -> None:
    wanted = child.requests(SAMPLING)
    engine.run(child.do, "sleep")
    engine.run(child.do, "wake", "weights")
    engine.run(child.do, "wake", "kv_cache")
    with pytest.raises(RunError, match="no update came since"):
        engine.run(child.generate, wanted)
    engine.run(child.update, 0)
    assert len(engine.run(child.generate, wanted)) == len(wanted)


def test_responses_in_flight_may_keep_their_keys_and_values(process: EngineProcess, tmp_path: Path) -> None:
    """Responses that begin after the update read nothing of the old policy; their prompts were cached before."""
    path = make_tiny(tmp_path / "qwen2", "qwen2", heads=2, kv_heads=1)
    keys = {"vllm.sync_mode": "inflight", "vllm.keep_kv_cache": True}
    process.run(child.start, path, keys=keys)
    done = process.run(child.generate, child.requests(SAMPLING, samples=2), 4, 1)
    mixed = [one for one in done if len(one.versions) == 2]
    assert len(mixed) > len(done) / 2
    assert process.run(child.differences_with_old_keys, mixed, (0, 1), SAMPLING.temperature) < 1e-5
    assert process.run(child.differences, mixed, [0, 1], SAMPLING.temperature)[1] > 1e-3
    for request in child.requests(SAMPLING, samples=1):
        process.run(child.do, "add", replace(request, key=f"first.{request.key}"))
    process.run(child.do, "step")
    process.run(child.update, 2)
    late = process.run(child.generate, child.requests(SAMPLING, samples=1))
    fresh = [one for one in late if not one.key.startswith("first.")]
    assert process.run(child.differences, fresh, [2], SAMPLING.temperature)[0] < 1e-5
