"""The comparison with another checkout sees the last bit of every number, what is missing, and where it begins."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from against import first_difference, numbers
from fixed_runs import STEPS
from safetensors.numpy import save_file

SAMPLE = {"prompt_index": 7, "sample": 1, "prompt": "1+1=", "response": "2", "finish_reason": "stop", "reward": 1.0}
SAMPLE |= {"score": 1.0, "advantage": 0.1, "engine": 0, "version": 0, "logprobs": [-0.5]}


def write(path: Path, changes: dict[str, Any] | None = None, at: int = 3, weight: float = 0.5) -> Path:
    """Write the files that a run leaves, with `changes` of the metrics and of the response of a step."""
    (path / "final").mkdir(parents=True)
    metrics, samples = [], []
    for step in range(1, STEPS + 1):
        new = changes if step == at and changes else {}
        row = {"step": step, "kl": 0.1, "loss": math.nan, "time/step": 1.0, "perf/engine/0/responses": 16.0}
        metrics.append({**row, **{name: new[name] for name in new if name not in SAMPLE}})
        samples.append({"step": step, **SAMPLE, **{name: new[name] for name in new if name in SAMPLE}})
    for name, rows in (("metrics", metrics), ("samples", samples)):
        kept = [{key: value for key, value in row.items() if value is not None} for row in rows]
        (path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
    save_file({"w": np.array([weight], np.float32)}, path / "final" / "model.safetensors")
    return path


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"kl": math.nextafter(0.1, 1)}, "step 3: kl: base 0.1, here 0.10000000000000002 (1 keys of "),
        ({"kl": None}, "step 3: kl: base 0.1, here nothing"),
        ({"loss": 1.0}, "step 3: loss: base NaN, here 1.0"),
        ({"perf/engine/0/responses": 15.0}, "step 3: perf/engine/0/responses: "),
        ({"logprobs": [-0.50001]}, "step 3: response 1 to prompt 7, logprobs: "),
        ({"time/step": 2.0}, ""),
        ({"new": 2.0}, ""),
    ],
)
def test_the_first_difference_is_named(tmp_path: Path, changes: dict[str, Any], expected: str) -> None:
    base, ours = numbers(write(tmp_path / "base")), numbers(write(tmp_path / "ours", changes))
    found = first_difference(base, ours)
    assert found.startswith(expected) if expected else not found
    assert not first_difference(base, ours, after=3)  # a run resumed from step 3 did not do that step itself
    assert found == "" or first_difference(base, ours, after=2) == found


def test_weights_and_what_the_base_has_not_recorded_count(tmp_path: Path) -> None:
    base = numbers(write(tmp_path / "base"))
    other = numbers(write(tmp_path / "other", weight=float(np.nextafter(np.float32(0.5), np.float32(1)))))
    assert first_difference(base, other).startswith(f"step {STEPS + 1}: final weights, w: ")
    assert first_difference({**base, 2: {}}, base) == "step 2: the base has recorded nothing"
