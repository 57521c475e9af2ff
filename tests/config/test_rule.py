"""Rows of rules.toml: conditions and sentences name keys and facts that are there."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from slurm_rlhf.algorithms.policy_losses import POLICY_LOSSES
from slurm_rlhf.algorithms.registry import built_in
from slurm_rlhf.config import rule
from slurm_rlhf.config.evaluation import data_sets
from slurm_rlhf.config.keys import all_keys
from slurm_rlhf.config.load import load_config

ROWS = tomllib.loads(Path(rule.__file__).with_name("rules.toml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("row", [pytest.param(row, id=group) for group, rows in ROWS.items() for row in rows])
def test_a_row_names_what_is_there(row: dict[str, Any]) -> None:
    lists = ("actor.eps_clip_low_high=0.2,0.3", "algo.correction.thresholds=0,2", "algo.dynamic_filtering_range=0,1")
    config = load_config(None, [f"--{word}" for word in ("eval.dataset=eval.jsonl", *lists)])
    known = rule.facts(config) | {
        "algorithm": built_in()["gae"],
        "one": data_sets(config)[0],
        "frozen": config.ref,
        "trainer": config.critic,
        "loss": POLICY_LOSSES["gspo"],
    }
    known |= dict.fromkeys(("name", "where", "chosen", "wrong_pattern", "fits"), "")
    known |= dict.fromkeys(("least", "first_scale", "weight", "shortest", "slots", "taken", "uneven"), 1)
    known |= dict.fromkeys(("empty_stop", "holds_prompt", "plain_name", "twice", "any_weight"), True)
    for condition in re.split(" and | or ", row["when"]):
        assert rule._holds(condition, known) in (True, False)
    assert row["says"].format_map(known)
    assert set(row.get("set", ())) <= set(all_keys())
    assert row.keys() <= {"when", "set", "says"}


def test_a_group_has_a_reader() -> None:
    folder = Path(rule.__file__).parent
    text = "".join(file.read_text(encoding="utf-8") for file in folder.glob("*.py"))
    assert [group for group in ROWS if f'"{group}"' not in text] == []
