"""Log-probs of vLLM, the trainer and transformers for the same tokens, on random models of many architectures."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import parity_matrix
import pytest
from waiting import HANG_S, scaled

from slurm_rlhf.config.architectures import COMPARED
from slurm_rlhf.parity.verdicts import NEW_TOKENS

pytestmark = [pytest.mark.engine, pytest.mark.slow]

CHOSEN = {
    "gemma2": "Gemma2ForCausalLM",  # a window shorter than the text; soft caps, of attention scores and of logits
    "qwen3_moe": "Qwen3MoeForCausalLM",  # a mixture of experts
}
PAIRS = ("vllm-trainer", "vllm-hf", "trainer-hf")


def check_parity(*words: str, timeout: float = HANG_S) -> tuple[int, dict[tuple[str, str], dict[str, Any]]]:
    command = [sys.executable, parity_matrix.__file__, "--json", *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=timeout, check=False)
    lines = json.loads(done.stdout)["lines"]  # nothing else is on standard output
    return done.returncode, {(line["model"], line["precision"]): line for line in lines}


def require_agreement(line: dict[str, Any]) -> None:
    assert line["verdict"] == "agree", f"{line['model']}, {line['precision']}: {line['reason']}\n{line['log']}"
    assert line["tokens"] >= 3 * NEW_TOKENS
    for pair in PAIRS:
        largest, mean = line["apart"][pair]["largest"], line["apart"][pair]["mean"]
        assert 0 <= mean <= largest
        assert mean < 0.02 if line["precision"] != "fp32" else largest < 1e-5


@pytest.fixture(scope="module")
def matrix() -> dict[tuple[str, str], dict[str, Any]]:
    code, lines = check_parity(*CHOSEN)
    assert code == 0
    return lines


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("arch", CHOSEN)
def test_the_three_agree(matrix: dict[tuple[str, str], dict[str, Any]], arch: str, precision: str) -> None:
    require_agreement(matrix[CHOSEN[arch], precision])


@pytest.mark.full
@pytest.mark.timeout(2400)
def test_all_architectures_of_the_table() -> None:
    """In fp32 and bf16, with the head in bf16 and in fp32."""
    code, lines = check_parity("--precision=fp32,bf16,bf16+head", timeout=scaled(2300))
    for name in COMPARED:
        for precision in ("fp32", "bf16", "bf16+head"):
            line = lines[name, precision]
            print(name, precision, line["verdict"], *(f"{line['apart'][p]['largest']:.1e}" for p in line["apart"]))
    for line in lines.values():
        require_agreement(line)
    assert code == 0
