"""Rows of rules.toml: conditions and sentences name keys and facts that are there."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from slurm_rlhf.algorithms.registry import built_in
from slurm_rlhf.config import rule
from slurm_rlhf.config.evaluation import data_sets
from slurm_rlhf.config.keys import all_keys
from slurm_rlhf.config.load import load_config

ROWS = tomllib.loads(Path(rule.__file__).with_name("rules.toml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("row", [pytest.param(row, id=group) for group, rows in ROWS.items() for row in rows])
def test_a_row_names_what_is_there(row: dict[str, Any]) -> None:
    config = load_config(None, ["--eval.dataset=eval.jsonl"])
    further = {"algorithm": built_in()["gae"], "one": data_sets(config)[0], "where": ""}
    further |= {"keys": config.algo.correction, "own": ""}
    known = rule.facts(config) | further
    for condition in re.split(" and | or ", row["when"]):
        assert rule._holds(condition, known) in (True, False)
    assert row["says"].format_map(known)
    assert set(row.get("unused", ())) <= set(all_keys())
    assert row.keys() <= {"when", "unused", "says"}


def test_a_group_has_a_reader() -> None:
    folder = Path(rule.__file__).parent
    text = "".join(file.read_text(encoding="utf-8") for file in folder.glob("*.py"))
    assert [group for group in ROWS if f'"{group}"' not in text] == []
