"""Choosing tokens from logits: the distribution, draws that are a request's own, and what ends a response."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from random_models import saved_tokenizer
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from slurm_rlhf.data.tokenizer import Tokenizer
from slurm_rlhf.engine._transformers import selects_rows
from slurm_rlhf.engine.engine import GenerateRequest
from slurm_rlhf.engine.hf import SampledRow, choose, distribution, padded_left, repeats
from slurm_rlhf.records import LENGTH, REPETITION, STOP, Sampling

CPU = torch.device("cpu")
EOS = 1


def row(seed: int = 0, **sampling: Any) -> SampledRow:
    return SampledRow(GenerateRequest("0.0", 0, 0, np.array([5, 6], np.int32), Sampling(**sampling), seed), CPU)


@functools.cache
def read_tokenizer() -> Tokenizer:
    with tempfile.TemporaryDirectory() as directory:
        return saved_tokenizer(Path(directory))


def taken(made: SampledRow, text: str, ends: frozenset[int] = frozenset({EOS})) -> SampledRow:
    """`made` after the tokens of `text`, of one letter each; it stops where it has ended."""
    tokenizer = read_tokenizer()
    for token in tokenizer.encode(text):
        if not made.reason:
            made.take(token, -1.0, 3, ends, tokenizer)
    return made


@pytest.mark.parametrize(("top_k", "top_p"), [(-1, 1.0), (5, 1.0), (-1, 0.6), (7, 0.8), (100, 0.01)])
def test_the_distribution_is_that_of_transformers(top_k: int, top_p: float) -> None:
    logits = torch.randn(4, 31, generator=torch.Generator().manual_seed(1)) * 3
    scores = TemperatureLogitsWarper(0.7)(None, logits.clone())
    if top_k > 0:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    found = distribution(logits, Sampling(temperature=0.7, top_k=top_k, top_p=top_p))
    assert torch.equal(found.isinf(), scores.isinf())
    torch.testing.assert_close(found.exp(), scores.softmax(-1))


def test_greedy_takes_the_likeliest_token_and_the_log_probs_of_the_plain_softmax() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0]])
    logprobs = distribution(logits, Sampling(temperature=0.0))
    torch.testing.assert_close(logprobs, logits.log_softmax(-1))
    assert choose(logprobs, [row()], greedy=True).tolist() == [1]


def test_draws_are_a_request_s_own_and_follow_the_distribution() -> None:
    logprobs = torch.tensor([0.6, 0.3, 0.1]).log()
    rows = [row(seed) for seed in range(6000)]
    together = choose(logprobs.repeat(len(rows), 1), rows, greedy=False)
    shares = torch.bincount(together, minlength=3) / len(rows)
    torch.testing.assert_close(shares, logprobs.exp(), atol=0.02, rtol=0)
    # Alone, and among others that have ended.
    for seed in (0, 1, 2):
        assert choose(logprobs[None], [row(seed)], greedy=False).item() == together[seed].item()
        ended = taken(row(9), "a", frozenset(read_tokenizer().encode("a")))
        pair = choose(logprobs.repeat(2, 1), [ended, row(seed)], greedy=False)
        assert pair[1].item() == together[seed].item()


@pytest.mark.parametrize(
    ("text", "sampling", "reason", "kept"),
    [
        ("abc<eos>d", {"max_new_tokens": 9}, STOP, "abc"),
        ("abcdef", {"max_new_tokens": 4}, LENGTH, "abcd"),
        ("abcdef", {"max_new_tokens": 9, "stop": ["zz", "cd"]}, STOP, "abcd"),
        ("abcdef", {"max_new_tokens": 4, "stop": ["cd"]}, STOP, "abcd"),  # the stop string counts, as in the engine
        ("abcdef" * 9 + "x1y2z3" * 4 + "end!!", {"max_new_tokens": 99, "stop": ["z3end"]}, STOP, None),
        ("xabab", {"max_new_tokens": 9, "max_pattern_size": 2, "min_count": 2}, REPETITION, "xabab"),
        ("xabac", {"max_new_tokens": 9, "max_pattern_size": 2, "min_count": 2}, "", "xabac"),
        (
            "aaaa",
            {"max_new_tokens": 9, "max_pattern_size": 3, "min_pattern_size": 2, "min_count": 2},
            REPETITION,
            "aaaa",
        ),
    ],
)
def test_what_ends_a_response(text: str, sampling: dict[str, Any], reason: str, kept: str | None) -> None:
    made = taken(row(**sampling), text)
    assert made.reason == reason
    trajectory = made.active.finish(made.reason, read_tokenizer(), 2)
    assert trajectory.text == (kept if kept is not None else text.partition("!")[0].removesuffix("d") + "d")
    assert [(span.start, span.end, span.version) for span in trajectory.versions] == [
        (0, len(trajectory.response_ids), 3)
    ]
    assert trajectory.action_mask.all()


def test_a_repetition_is_what_a_count_of_all_tails_finds() -> None:
    rng = np.random.default_rng(0)
    seen = set()
    for _ in range(300):
        tokens = rng.integers(0, 2, rng.integers(1, 10)).tolist()
        low, high, count = int(rng.integers(1, 3)), int(rng.integers(1, 4)), int(rng.integers(2, 4))
        brute = any(
            len(tokens) >= size * count
            and all(tokens[-size * (k + 1) : len(tokens) - size * k] == tokens[-size:] for k in range(count))
            for size in range(low, high + 1)
        )
        found = repeats(tokens, Sampling(max_pattern_size=high, min_pattern_size=low, min_count=count))
        assert found == brute
        seen.add(found)
    assert seen == {True, False}


def test_prompts_end_in_the_last_column() -> None:
    inputs = padded_left([[7, 8, 9], [5]], 0, CPU)
    assert inputs["input_ids"].tolist() == [[7, 8, 9], [0, 0, 5]]
    assert inputs["attention_mask"].tolist() == [[1, 1, 1], [0, 0, 1]]


def test_a_stop_string_of_more_tokens_than_are_looked_at_first_is_found() -> None:
    made = taken(row(max_new_tokens=99, stop=["abcdefghijkl"]), "x" * 30 + "abcdefghijklzz")
    assert made.active.finish(made.reason, read_tokenizer(), 0).text == "x" * 30 + "abcdefghijkl"
    assert made.reason == STOP


def test_rows_are_taken_of_caches_of_keys_and_values_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers
    from transformers.cache_utils import DynamicLayer

    model = SimpleNamespace(_supports_default_dynamic_cache=lambda: True, config=None)
    for layers, answer in (([], False), ([DynamicLayer()], True), ([DynamicLayer(), object()], False)):
        monkeypatch.setattr(transformers, "DynamicCache", lambda config, kept=layers: SimpleNamespace(layers=kept))
        assert selects_rows(model) is answer
