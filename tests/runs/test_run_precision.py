"""A whole run in fp16 with the LM head in fp32: the scale finds its place, and engine and actor agree better."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors import safe_open
from training_runs import metrics, train, workspace

pytestmark = [pytest.mark.engine, pytest.mark.slow]

STEPS = 2
BF16_DIFFERENCE = 0.009
"""Mean of |log-prob of the engine - log-prob of the actor| of this run in bf16."""


def test_fp16_in_trainer_and_engine(tmp_path: Path) -> None:
    config = workspace(tmp_path / "work")
    words = ["--ds.param_dtype=fp16", "--ds.fp32_lm_head=true", "--ds.initial_scale_power=20"]
    run_dir = tmp_path / "run"
    code, output = train(config, run_dir, *words, f"--train.max_steps={STEPS}", "--eval.dataset=", warm=True)
    assert code == 0, output
    rows = metrics(run_dir)
    assert len(rows) == STEPS
    for role in ("actor", "critic"):
        assert rows[0][f"{role}_skipped_steps"] > 0
        assert rows[-1][f"{role}_loss_scale"] < 2.0**20
        assert rows[-1][f"{role}_grad_norm"] > 0.0
    for row in rows:
        assert row["rollout_logprob_diff"] < BF16_DIFFERENCE / 4
        assert row["first_approx_kl"] == pytest.approx(0.0, abs=1e-6)
    figures = json.loads((run_dir / "summary.json").read_text())["self_check"]
    assert figures["engine"] < BF16_DIFFERENCE / 4
    (file,) = (run_dir / "final").glob("*.safetensors")
    with safe_open(file, "pt") as final:
        assert {str(final.get_tensor(name).dtype) for name in final.keys()} == {"torch.float16"}  # noqa: SIM118
