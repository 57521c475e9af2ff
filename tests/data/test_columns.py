"""`data.map`, `data.filter` and `data.weights`: which rows of which files a command reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from slurm_rlhf.config.load import load_config
from slurm_rlhf.config.rules import key_problems
from slurm_rlhf.config.schema import Config, Data
from slurm_rlhf.data.rows import read_rows
from slurm_rlhf.errors import ConfigError, DataError

ROWS = [
    {"question": "1+1=", "reward": {"truth": "2"}, "source": "math", "level": 1},
    {"question": "capital?", "reward": {"truth": "Rome"}, "source": "geo", "level": 2},
    {"question": "2+2=", "reward": {"truth": "4"}, "source": "math", "level": 3.5},
]


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_columns_are_renamed_also_out_of_tables(tmp_path: Path) -> None:
    file = written(tmp_path / "a.jsonl", ROWS)
    data = Data(map=["input=question", "label=reward.truth"])
    assert [row for _, row in read_rows(file, 1, data)] == [
        {"input": "1+1=", "label": "2", "reward": {"truth": "2"}, "source": "math", "level": 1}
    ]
    other = written(tmp_path / "b.jsonl", [{"input": "x", "label": "y"}])
    assert [row for _, row in read_rows(other, 0, data)] == [{"input": "x", "label": "y"}]


@pytest.mark.parametrize(
    ("entries", "taken"),
    [
        (["source=math"], [0, 2]),
        (["source!=math"], [1]),
        (["level<3"], [0, 1]),
        (["level >= 2", "source = math"], [2]),
        (["level=1"], [0]),
        (["level=1.0"], [0]),
        (["reward.truth=Rome"], [1]),
        ([], [0, 1, 2]),
    ],
)
def test_rows_for_which_all_conditions_hold_are_taken(tmp_path: Path, entries: list[str], taken: list[int]) -> None:
    file = written(tmp_path / "a.jsonl", ROWS)
    assert [row for _, row in read_rows(file, 0, Data(filter=entries))] == [ROWS[place] for place in taken]


def test_a_column_that_cannot_be_compared_is_an_error_of_its_row(tmp_path: Path) -> None:
    file = written(tmp_path / "a.jsonl", ROWS)
    for entry, problem in (
        ("source<3", "'source' is 'math', and data.filter compares"),
        ("none=3", "no column 'none'"),
    ):
        where, row = next(read_rows(file, 0, Data(filter=[entry])))
        assert isinstance(row, DataError)
        assert where == f"{file}:1"
        assert problem in str(row)


def test_several_data_sets_come_one_after_the_other_or_in_shares(tmp_path: Path) -> None:
    big = written(tmp_path / "big.jsonl", [{"input": f"b{number}"} for number in range(100)])
    small = written(tmp_path / "small.jsonl", [{"input": f"s{number}"} for number in range(10)])
    both = Path(f"{big},{small}")
    assert len([*read_rows(both)]) == 110
    mixed = [row["input"] for _, row in read_rows(both, 0, Data(weights=[3, 1])) if isinstance(row, dict)]
    assert len(mixed) == len(set(mixed)) == 40
    assert sum(name[0] == "s" for name in mixed) == 10
    assert sum(name[0] == "s" for name in mixed[:12]) == 3  # any beginning has the shares
    assert {name[0] for name in mixed} == {"b", "s"}
    assert mixed == [row["input"] for _, row in read_rows(both, 0, Data(weights=[3, 1])) if isinstance(row, dict)]
    only = [row["input"] for _, row in read_rows(both, 0, Data(weights=[0, 1])) if isinstance(row, dict)]
    assert only == [f"s{number}" for number in range(10)]
    with pytest.raises(ConfigError, match=r"data\.weights has 3 numbers, and .* joins 2 data sets"):
        read_rows(both, 0, Data(weights=[1, 1, 1]))


def test_files_with_unlike_columns_are_refused(tmp_path: Path) -> None:
    labelled = written(tmp_path / "a.jsonl", [{"input": "1", "label": "2"}])
    bare = written(tmp_path / "b.jsonl", [{"input": "1", "answer": "2"}])
    both = Path(f"{labelled},{bare}")
    with pytest.raises(DataError, match=rf"{bare} has no column 'label' \(data.label_key\), and {labelled} has one"):
        [*read_rows(both, 0, Data())]
    assert len([*read_rows(both, 0, Data(map=["label=answer"]))]) == 2


def test_paths_joined_by_commas_start_at_the_file(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[data]\nprompt_dataset = "a.jsonl, /b.jsonl"\n')
    assert load_config(file).data.prompt_dataset == f"{tmp_path}/a.jsonl,/b.jsonl"
    (tmp_path / "a.jsonl, ").mkdir()
    written(tmp_path / "a.jsonl, /b.jsonl", ROWS)
    assert load_config(file).data.prompt_dataset == f"{tmp_path}/a.jsonl, /b.jsonl"


def test_what_cannot_be_read_is_a_broken_rule() -> None:
    config = Config()
    config.data.weights, config.data.filter, config.data.map = [0.0, 0.0], ["level<three", "a=b"], ["input<question"]
    problems = "\n".join(key_problems(config))
    assert "data.weights = [0.0, 0.0] sums to zero" in problems
    assert "data.filter has 'level<three'" in problems
    assert "'a=b'" not in problems
    assert "data.map has 'input<question'" in problems


def test_only_tables_lose_keys_that_hold_nothing(tmp_path: Path) -> None:
    call = {"name": "find", "arguments": {"where": "Rome", "year": None}}
    rows = [{"input": [{"role": "user", "content": None, "name": None, "tool_calls": [call]}], "info": {"year": None}}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    read = {"role": "user", "content": None, "tool_calls": [call]}
    assert [row["input"] for _, row in read_rows(written(tmp_path / "a.jsonl", rows))] == [[read]]
    bare = read | {"tool_calls": [{"name": "find", "arguments": {"where": "Rome"}}]}
    (found,) = (row for _, row in read_rows(tmp_path / "a.parquet"))
    assert found == {"input": [bare], "info": {"year": None}}
