"""Rows of a data set: one file, several, and the directories of the library `datasets`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import ipc, parquet

from slurm_rlhf.config.user_data import data_files
from slurm_rlhf.data.rows import read_rows
from slurm_rlhf.errors import DataError

ROWS = [{"input": "1+1=", "label": "2"}, {"input": 'a "b",\nc', "label": "ü"}]
CHAT = [{"input": [{"role": "user", "content": "hi"}], "label": "x"}]


def jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def arrow(path: Path, rows: list[dict[str, Any]]) -> None:
    table = pyarrow.Table.from_pylist(rows)
    with open(path, "wb") as file, ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)


WRITERS = {".jsonl": jsonl, ".arrow": arrow, ".parquet": write_parquet}


def rows_of(path: Path, most: int = 0) -> list[Any]:
    return [row for _, row in read_rows(path, most)]


@pytest.mark.parametrize("suffix", WRITERS)
def test_every_format_gives_the_same_rows(tmp_path: Path, suffix: str) -> None:
    for number, rows in enumerate((ROWS, CHAT)):
        file = tmp_path / f"rows{number}{suffix}"
        WRITERS[suffix](file, rows)
        assert rows_of(file) == rows
    assert rows_of(file, 1) == CHAT[:1]


def test_csv_has_its_columns_in_the_first_line(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_bytes('﻿input,label\n1+1=,2\n"a ""b"",\nc",ü\nalone\n1,2,3\n'.encode())
    *whole, short, long = read_rows(file)
    assert [row for _, row in whole] == ROWS
    assert [where for where, _ in whole] == [f"{file}:2", f"{file}:4"]
    for where, row in (short, long):
        assert isinstance(row, DataError)
        assert str(row) == f"{where}: the row has another number of values than the first line"
    file.write_bytes(b"input\n\xff\n")
    with pytest.raises(DataError, match="not a CSV file in UTF-8 that can be read"):
        rows_of(file)


def test_a_pattern_names_several_files_in_order(tmp_path: Path) -> None:
    for number in (2, 1):
        jsonl(tmp_path / f"train-{number}.jsonl", [{"input": str(number)}])
    jsonl(tmp_path / "test.jsonl", [{"input": "no"}])
    assert rows_of(tmp_path / "train-*.jsonl") == [{"input": "1"}, {"input": "2"}]


def test_a_saved_data_set_is_read_in_the_order_of_its_state(tmp_path: Path) -> None:
    names = ["data-00001-of-00002.arrow", "data-00000-of-00002.arrow"]
    for name, row in zip(names, ROWS, strict=True):
        arrow(tmp_path / name, [row])
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (tmp_path / "dataset_info.json").write_text("{}")
    assert rows_of(tmp_path) == ROWS
    (tmp_path / "state.json").write_text("{}")
    with pytest.raises(DataError, match=r"state\.json: not that of a saved data set: '_data_files'"):
        data_files(tmp_path)


def test_a_directory_of_the_hub_holds_its_files_in_data(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "README.md").write_text("a data set")
    for number, row in enumerate(ROWS):
        write_parquet(tmp_path / "data" / f"train-0000{number}-of-00002.parquet", [row])
    assert rows_of(tmp_path) == ROWS
    write_parquet(tmp_path / "data" / "test-00000-of-00001.parquet", ROWS)
    with pytest.raises(DataError, match=r"several splits \(test, train\): name the files of one, .*/train\*\.parquet"):
        data_files(tmp_path)
    assert rows_of(tmp_path / "data" / "train*.parquet") == ROWS


def test_splits_of_a_saved_dictionary_are_named(tmp_path: Path) -> None:
    (tmp_path / "dataset_dict.json").write_text("{}")
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
        (tmp_path / split / "state.json").write_text("{}")
    with pytest.raises(DataError, match=r"holds the splits test, train: name one, .*/test"):
        data_files(tmp_path)


def test_what_is_no_data_set_says_what_to_write(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="a directory without files of rows"):
        data_files(tmp_path)
    with pytest.raises(DataError, match=r"^no such file: .*none\.jsonl$"):
        data_files(tmp_path / "data" / "none.jsonl")
    with pytest.raises(DataError, match="openai/gsm8k is a data set of the Hugging Face hub: `slurm-rlhf prefetch"):
        data_files(tmp_path / "openai" / "gsm8k")
    jsonl(tmp_path / "a.jsonl", ROWS)
    (tmp_path / "b.csv").write_text("input\n1\n")
    with pytest.raises(DataError, match=r"files of several formats \(\.csv, \.jsonl\): name those of one"):
        data_files(tmp_path)
    (tmp_path / "torn.arrow").write_bytes(b"torn")
    with pytest.raises(DataError, match="no Arrow file that can be read"):
        rows_of(tmp_path / "torn.arrow")
    (tmp_path / "torn.json").write_text('[{"input": "1"}, {')
    with pytest.raises(DataError, match=r"torn\.json: not JSON that can be read: "):
        rows_of(tmp_path / "torn.json")
