"""Duties of every engine: which tokens it samples, with which weights, and that plain transformers agrees."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import rollout_engine as child
from msgspec.structs import replace
from random_models import tiny_tokenizer
from rollout_engine import EngineProcess, tokens
from tiny_models import make_tiny

from slurm_rlhf.errors import RunError, SyncError
from slurm_rlhf.records import Sampling, Trajectory, VersionSpan

SAMPLING = Sampling(max_new_tokens=24, temperature=0.9)
EOS = 1
START = {"vllm": child.start, "hf": child.start_hf}


@pytest.fixture(scope="module", params=START)
def backend(request: pytest.FixtureRequest) -> str:
    """A name of rollout.engine."""
    return str(request.param)


@pytest.fixture(scope="module")
def engine(engine_process: EngineProcess, backend: str, path: Path) -> EngineProcess:
    """An engine with the number 5."""
    engine_process.run(START[backend], path, number=5)
    return engine_process


def logprobs(trajectories: list[Trajectory]) -> list[list[float]]:
    return [t.rollout_logprobs.tolist() for t in trajectories]


def test_a_trajectory_per_request(fresh: EngineProcess) -> None:
    wanted = child.requests(SAMPLING, samples=3)
    done = fresh.run(child.generate, wanted)
    assert [(t.prompt, t.sample) for t in done] == [(r.prompt, r.sample) for r in wanted]
    decode = tiny_tokenizer().decode
    for request, t in zip(wanted, done, strict=True):
        length = len(t.response_ids)
        assert t.prompt_ids.tolist() == request.prompt_ids.tolist()
        assert len(t.rollout_logprobs) == len(t.action_mask) == length > 0
        assert t.action_mask.all()
        assert t.versions == [VersionSpan(0, length, 0)]
        assert t.engine == 5
        assert t.finish_reason == ("stop" if t.response_ids[-1] == EOS else "length")
        assert t.finish_reason == "stop" or length == SAMPLING.max_new_tokens
        assert EOS not in t.response_ids[:-1]
        assert t.text == decode(t.response_ids.tolist(), skip_special_tokens=True)
    assert {t.finish_reason for t in done} == {"stop", "length"}
    assert len({tuple(ids) for ids in tokens(done)}) == len(done)


def test_logprobs_are_of_the_distribution_sampled_from(fresh: EngineProcess) -> None:
    done = fresh.run(child.generate, child.requests(replace(SAMPLING, temperature=1.7, top_k=3), samples=2))
    assert fresh.run(child.differences, done, [0], 1.7, 3)[0] < 1e-5
    assert fresh.run(child.differences, done, [0], 1.7)[0] > 0.1
    narrow = fresh.run(child.generate, child.requests(replace(SAMPLING, top_p=1e-6)))
    assert all((t.rollout_logprobs == 0).all() for t in narrow)
    greedy = fresh.run(child.generate, child.requests(replace(SAMPLING, temperature=0.0)))
    assert tokens(greedy) == tokens(narrow)
    assert fresh.run(child.differences, greedy, [0], 1.0)[0] < 1e-5


def test_same_requests_same_bits(engine_process: EngineProcess, backend: str, path: Path) -> None:
    engine_process.run(START[backend], path, number=5)
    first, again = [engine_process.run(child.generate, child.requests(SAMPLING, samples=4)) for _ in range(2)]
    other = engine_process.run(child.generate, child.requests(SAMPLING, samples=4, version=1))
    engine_process.run(START[backend], path, number=5)
    restarted = engine_process.run(child.generate, child.requests(SAMPLING, samples=4))
    assert tokens(first) == tokens(restarted)
    assert logprobs(first) == logprobs(restarted)
    assert tokens(first) == tokens(again)
    # Where there is a prefix cache, the long prompts come out of it: other sums, in the last bits.
    assert all(np.allclose(a, b, rtol=0, atol=1e-5) for a, b in zip(logprobs(first), logprobs(again), strict=True))
    assert all(a != b for a, b in zip(tokens(first), tokens(other), strict=True))


def test_stop_strings(fresh: EngineProcess) -> None:
    plain = fresh.run(child.generate, child.requests(SAMPLING))
    whole = max(plain, key=lambda t: len(t.text))
    stop = whole.text[6:9]  # three tokens of this tokenizer
    end = whole.text.index(stop) + 3
    stopped = fresh.run(child.generate, child.requests(replace(SAMPLING, stop=["no such text", stop])))
    cut = next(t for t in stopped if t.prompt == whole.prompt)
    assert cut.text == whole.text[:end]
    assert cut.finish_reason == "stop"
    assert cut.response_ids.tolist() == whole.response_ids[:end].tolist()
    assert cut.rollout_logprobs.tolist() == pytest.approx(whole.rollout_logprobs[:end].tolist(), abs=1e-5)
    assert cut.versions == [VersionSpan(0, end, 0)]
    for before, after in zip(plain, stopped, strict=True):
        if stop not in before.text:
            assert (before.text, before.finish_reason) == (after.text, after.finish_reason)


def test_a_response_that_repeats_itself_ends_early(fresh: EngineProcess) -> None:
    """Greedy responses of a random model run into loops; each is cut at the first token that completes a pattern."""
    how = replace(SAMPLING, temperature=0.0, max_new_tokens=48)
    detect = replace(how, max_pattern_size=3, min_pattern_size=2, min_count=4)
    plain, cut = (fresh.run(child.generate, child.requests(sampling)) for sampling in (how, detect))
    reasons = {t.finish_reason for t in cut}
    assert "repetition" in reasons
    for whole, short in zip(tokens(plain), cut, strict=True):
        ends = [end for end in range(8, len(whole) + 1) for size in (2, 3) if repeats(whole[:end], size, 4)]
        # A token that ends a response by itself, or is its last one by the limit, comes before the pattern.
        wanted = "repetition" if ends and ends[0] < len(whole) else "stop" if whole[-1] == EOS else "length"
        assert short.finish_reason == wanted
        assert short.response_ids.tolist() == whole[: ends[0] if wanted == "repetition" else len(whole)]
        assert len(short.rollout_logprobs) == len(short.response_ids) == short.versions[-1].end
        assert short.text == tiny_tokenizer().decode(short.response_ids.tolist(), skip_special_tokens=True)


def repeats(ids: list[int], size: int, count: int) -> bool:
    """Tell whether `ids` end with `count` times the same `size` tokens."""
    tail = ids[-size * count :]
    return len(tail) == size * count and tail == tail[:size] * count


def test_the_engine_goes_on_after_a_stop_string(fresh: EngineProcess) -> None:
    """Requests that were cut short leave nothing behind in the scheduler."""
    fresh.run(child.generate, child.requests(replace(SAMPLING, stop=list("0123456789abcdefghijklmnopq"))))
    first = fresh.run(child.generate, child.requests(SAMPLING))
    assert len(first) == len(child.PROMPT_LENGTHS)


def test_what_is_dropped_in_the_middle_is_not_in_the_way_of_what_comes(fresh: EngineProcess) -> None:
    """Keys are free, the same requests are sampled from their beginning, and nothing of the dropped ones comes back."""
    wanted = child.requests(SAMPLING)
    before = fresh.run(child.generate, wanted)
    for request in wanted:
        fresh.run(child.do, "add", request)
    for _ in range(3):
        fresh.run(child.do, "step")
    with pytest.raises(RunError, match=r"key '0\.0' is in use"):
        fresh.run(child.do, "add", wanted[0])
    assert 0 < fresh.run(child.do, "status").unfinished <= len(wanted)
    fresh.run(child.do, "drop")
    assert fresh.run(child.do, "status").unfinished == 0
    assert fresh.run(child.do, "step") == []
    after = fresh.run(child.generate, wanted)
    assert tokens(after) == tokens(before)
    assert fresh.run(child.differences, after, [0], SAMPLING.temperature)[0] < 1e-5


def test_requests_that_come_later_and_of_another_kind_are_sampled_too(fresh: EngineProcess) -> None:
    first, second, third = child.requests(SAMPLING)[:3]
    greedy = replace(second, sampling=replace(SAMPLING, temperature=0.0))
    alone = [fresh.run(child.generate, [request])[0] for request in (first, greedy, third)]
    sampled = fresh.run(child.do, "status").sampled
    fresh.run(child.do, "add", first)
    done = fresh.run(child.do, "step")
    fresh.run(child.do, "add", greedy)
    fresh.run(child.do, "add", third)
    done += fresh.run(child.generate, [])
    assert tokens(sorted(done, key=lambda t: t.prompt)) == tokens(alone)
    assert fresh.run(child.do, "status").sampled == sampled + sum(len(t.response_ids) for t in alone)


@pytest.mark.parametrize("broken", [False, True], ids=["whole", "repeated"])
def test_an_update_between_two_steps(fresh: EngineProcess, broken: bool) -> None:
    wanted = child.requests(SAMPLING, samples=2)
    undisturbed = fresh.run(child.generate, wanted)
    assert tokens(fresh.run(child.generate, wanted, 6, 0)) == tokens(undisturbed)
    mixed = fresh.run(child.generate, wanted, 6, 1, broken)
    for t in mixed:
        length = len(t.response_ids)
        spans = [VersionSpan(0, 6, 0), VersionSpan(6, length, 1)]
        assert t.versions == (spans if length > 6 else [VersionSpan(0, length, 0)])
    assert any(len(t.versions) == 2 for t in mixed)
    assert max(fresh.run(child.differences, mixed, [0, 1], SAMPLING.temperature)) < 1e-5
    assert fresh.run(child.differences, mixed, [0], SAMPLING.temperature)[0] > 0.1


def test_it_sleeps_and_comes_back_part_by_part(fresh: EngineProcess) -> None:
    """Parts come back in one order, on CPUs too, where memory stays: on a GPU another order would read freed memory."""
    wanted = child.requests(SAMPLING)
    before = fresh.run(child.generate, wanted)
    fresh.run(child.do, "add", wanted[0])
    assert fresh.run(child.do, "sleep") == 0
    assert fresh.run(child.generate, []) == []  # requests in flight are gone
    with pytest.raises(RunError, match="asleep: it has freed its weights and kv_cache"):
        fresh.run(child.generate, wanted)
    with pytest.raises(RunError, match="asleep: it has freed its weights"):
        fresh.run(child.update, 1)
    fresh.run(child.do, "wake", "weights")
    with pytest.raises(RunError, match=r"has its weights already; parts that it lacks: .'kv_cache'"):
        fresh.run(child.do, "wake", "weights")
    with pytest.raises(RunError, match="asleep: it has freed its kv_cache"):
        fresh.run(child.generate, wanted)
    fresh.run(child.do, "wake", "kv_cache")
    with pytest.raises(RunError, match="no usable weights: it has slept, and no update came since"):
        fresh.run(child.generate, wanted)
    fresh.run(child.do, "sleep")
    fresh.run(child.do, "wake", "weights")
    fresh.run(child.update, 0)
    fresh.run(child.do, "wake", "kv_cache")
    after = fresh.run(child.generate, wanted)
    assert tokens(after) == tokens(before)
    assert logprobs(after) == logprobs(before)


@pytest.mark.parametrize(
    ("change", "error", "stated"),
    [
        ("missing", SyncError, r"1 of \d+ parameters were not sent: model.layers.1.self_attn.k_proj.weight"),
        (
            "shape",
            SyncError,
            r"'model.layers.1.self_attn.k_proj.weight' has shape \(32, 1\), the engine's has \(32, 64\)",
        ),
        ("cut", ConnectionResetError, "the sender is gone"),
    ],
)
def test_a_bad_update_is_an_error_and_the_next_one_mends_it(
    fresh: EngineProcess, change: str, error: type[Exception], stated: str
) -> None:
    with pytest.raises(error, match=stated):
        fresh.run(child.update_with, change, 3)
    with pytest.raises(RunError, match="policy version 3 failed"):
        fresh.run(child.generate, child.requests(SAMPLING))
    fresh.run(child.update, 2)
    assert fresh.run(child.generate, []) == []  # the step that failed dropped its requests, and their keys are free
    done = fresh.run(child.generate, child.requests(SAMPLING))
    assert fresh.run(child.differences, done, [2], SAMPLING.temperature)[0] < 1e-5


@pytest.mark.parametrize("arch", ["qwen2", "llama"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_logprobs_follow_every_update(
    engine_process: EngineProcess, backend: str, tmp_path: Path, arch: str, tied: bool
) -> None:
    engine_process.run(START[backend], make_tiny(tmp_path / arch, arch, tied, heads=2, kv_heads=1, seed=3))
    for version in range(4):
        if version:
            engine_process.run(child.update, version)
        done = engine_process.run(child.generate, child.requests(SAMPLING, samples=2, version=version))
        assert {span.version for t in done for span in t.versions} == {version}
        assert engine_process.run(child.differences, done, [version], SAMPLING.temperature)[0] < 1e-5
        if version:
            assert engine_process.run(child.differences, done, [version - 1], SAMPLING.temperature)[0] > 0.1
    described = engine_process.run(child.do, "describe")
    assert engine_process.run(child.do, "status").version == 3
    assert ("model.embed_tokens.weight", [69, 64], "float32") in described
    assert any(entry[0] == "lm_head.weight" for entry in described) is not tied
