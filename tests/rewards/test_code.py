"""Presets: code by the tests of its row, answers by the scorers of reasoning-gym."""

from __future__ import annotations

import pytest
from sampled_responses import item

from slurm_rlhf.config.schema import Data
from slurm_rlhf.errors import ConfigError, RewardError
from slurm_rlhf.rewards.presets import Preset
from slurm_rlhf.rewards.reasoning_gym import task_rows
from slurm_rlhf.sandbox import box


def test_code_is_scored_by_the_column_tests_or_the_label() -> None:
    code, tests = "```python\ndef add(a, b):\n    return a + b\n```", ["assert add(1, 1) == 2", "assert add(1, 1) == 3"]
    reward = Preset("code", "auto")
    by_column = item(code, "other", row={"tests": tests})
    by_label = item(code, tests[:1])
    assert reward.answer([by_column, by_label], 1) == {"rewards": [0.5, 1.0], "scores": [0.5, 1.0]}
    with pytest.raises(RewardError, match=r"neither a column 'tests' nor a label \(columns: input\)"):
        reward.answer([item(code, row={"input": "x"})], 1)


def test_a_node_without_the_sandbox_is_reported_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(box, "problem", lambda kind: f"no {kind}")
    box.chosen.cache_clear()
    with pytest.raises(ConfigError, match=r"reward\.sandbox = 'auto': .* \(bubblewrap: no bubblewrap; "):
        Preset("code", "auto")
    box.chosen.cache_clear()


@pytest.mark.slow
def test_tasks_are_scored_by_their_own_scorers() -> None:
    reward = Preset("reasoning_gym", "")
    rows = [row for _, row in task_rows(Data(reasoning_gym="gcd,spell_backward", max_samples=4))]
    right = [item(row["label"], row["label"], row=row) for row in rows]
    assert reward.answer(right, 1)["rewards"] == [1.0] * 4
    assert max(reward.answer([item("?", row=row) for row in rows], 1)["rewards"]) < 0.2
    with pytest.raises(RewardError, match=r"no column 'reasoning_gym_task', .*data\.reasoning_gym"):
        reward.answer([item("1", row={"input": "x"})], 1)
