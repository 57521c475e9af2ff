"""How far three sides are apart, what is said of it, and how it is shown: pure functions."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from slurm_rlhf.eval.verdicts import BOUNDS
from slurm_rlhf.parity.verdicts import (
    AGREE,
    DIFFER,
    PRECISIONS,
    Apart,
    Line,
    differences,
    head,
    judge,
    name_width,
    reasons,
    row,
    summary,
)

FP32, BF16 = PRECISIONS["fp32"], PRECISIONS["bf16"]


def sides(vllm: list[float], trainer: list[float], hf: list[float]) -> dict[str, Any]:
    return {name: np.array(value, np.float32) for name, value in (("vllm", vllm), ("trainer", trainer), ("hf", hf))}


def test_each_pair_is_compared_over_all_tokens() -> None:
    apart = differences(sides([-1.0, -2.0], [-1.5, -2.0], [-1.0, -2.25]))
    assert apart == {"vllm-trainer": Apart(0.5, 0.25), "vllm-hf": Apart(0.25, 0.125), "trainer-hf": Apart(0.5, 0.375)}


def test_fp32_counts_its_worst_token_and_16_bits_the_mean() -> None:
    one_off = differences(sides([-1.0] * 1000, [-1.0] * 999 + [-1.01], [-1.0] * 1000))
    assert judge(one_off, FP32)[0] == DIFFER
    assert judge(one_off, BF16) == (AGREE, "")
    assert BF16.bound() == (BOUNDS["bf16"]["engine"].limit, "mean")


@pytest.mark.parametrize(
    ("logprobs", "said"),
    [
        (
            sides([-1.5], [-1.0], [-1.0]),
            r"vllm-\w+: 0.5 nats \(largest; rounding makes at most 1e-05.*vLLM computes this",
        ),
        (sides([-1.0], [-1.5], [-1.0]), "the trainer computes it differently.*ds.attn_implementation"),
        (sides([-1.0], [-1.0], [-1.5]), "engine and trainer agree"),
        (sides([-1.0], [-2.0], [-4.0]), r"vllm-hf: 3 nats .*No two of them agree"),
        (sides([math.nan], [-1.0], [-1.0]), "nan nats .*vLLM computes"),
    ],
)
def test_the_side_that_is_apart_is_named(logprobs: dict[str, Any], said: str) -> None:
    import re

    verdict, reason = judge(differences(logprobs), FP32)
    assert verdict == DIFFER
    assert re.search(said, reason)


SAME = {name: Apart(1e-7, 1e-8) for name in ("vllm-trainer", "vllm-hf", "trainer-hf")}
LINES = [
    Line("Gemma2ForCausalLM", "fp32", AGREE, tokens=190, apart=SAME, architecture="Gemma2ForCausalLM"),
    Line("Gemma2ForCausalLM", "bf16", DIFFER, "vLLM is apart", 190, {**SAME, "vllm-hf": Apart(math.nan, math.nan)}),
    Line("x/y", "fp32", "failed", "its process was killed by SIGSEGV", log=("Fatal: segfault",)),
    Line("ApertusForCausalLM", "", "refused", "it differs"),
]


def test_lines_stand_below_their_columns_and_reasons_below_the_table() -> None:
    width = name_width(LINES)
    shown = [*head(width).splitlines(), *(row(line, width, first=line.precision != "bf16") for line in LINES)]
    assert shown[1].split() == ["model", "precision", "tokens", *("max", "mean") * 3, "verdict"]
    assert shown[2].split() == ["Gemma2ForCausalLM", "fp32", "190", *("1.0e-07", "1.0e-08") * 3, "agree"]
    assert shown[3].split() == ["bf16", "190", *SAME_FIGURES, "NaN", "NaN", *SAME_FIGURES, "differ"]
    assert shown[4].split() == ["x/y", "fp32", "-", *["-"] * 6, "failed"]
    assert len({line.rstrip().rfind(" ") for line in shown[2:]}) == 1, "the verdicts stand in one column"
    stated = reasons(LINES, 60).splitlines()
    assert stated[0] == "Gemma2ForCausalLM, bf16: differ: vLLM is apart"
    assert stated[1:3] == ["x/y, fp32: failed: its process was killed by SIGSEGV", "    Fatal: segfault"]
    assert stated[3] == "ApertusForCausalLM: refused: it differs"
    assert reasons(LINES[:1], 60) == ""
    assert summary(LINES) == "1 agree, 1 differ, 1 refused, 1 failed"


SAME_FIGURES = ["1.0e-07", "1.0e-08"]


def test_json_has_null_for_what_is_no_number() -> None:
    plain = json.loads(json.dumps(LINES[1].to_json(), allow_nan=False))
    assert plain["apart"]["vllm-hf"] == {"largest": None, "mean": None}
    assert plain["apart"]["vllm-trainer"]["largest"] == 1e-7
    assert {"model", "precision", "verdict", "reason", "tokens", "architecture", "log"} < set(plain)
