"""The output holds whole lines only, whatever a kill, a crash or a full disk has left; shards become one file."""

from __future__ import annotations

import json
import os
import resource
import signal
from pathlib import Path

import pytest

from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import ConfigError, DataError
from slurm_rlhf.generate.identity import COUNT, FILE, ID, LAST, RowShard, claim, identity_of, merge, shard_here
from slurm_rlhf.generate.output import MERGED, OUTPUT, OutputFile, OutputLine, line_of


def answer(row: int, sample: int = 0, text: str = "four") -> OutputLine:
    return OutputLine(row, sample, "2+2=", text, "stop", 4, 2, 1.0, 7, 0)


def rows(path: Path) -> list[tuple[int, int]]:
    return [(line["row"], line["sample"]) for line in map(json.loads, path.read_text().splitlines())]


def test_a_torn_last_line_is_cut_wherever_the_kill_came(tmp_path: Path) -> None:
    path = tmp_path / OUTPUT
    whole = b"".join(line_of(answer(row, text="é\u2028\n\ud800")) for row in range(3))
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        output = OutputFile(path)
        done = whole[:size].count(b"\n")
        assert output.counts.done == {(row, 0) for row in range(done)}
        output.append([answer(row) for row in range(done, 3)])
        output.close()
        assert rows(path) == [(0, 0), (1, 0), (2, 0)]


def test_what_a_crashed_node_leaves_at_the_end_is_cut_and_a_line_in_the_middle_is_named(tmp_path: Path) -> None:
    path = tmp_path / OUTPUT
    path.write_bytes(line_of(answer(0)) + b"\0" * 100)
    OutputFile(path).close()
    assert rows(path) == [(0, 0)]
    damaged = line_of(answer(0)) + b'{"mine": 1}\n' + line_of(answer(1))
    path.write_bytes(damaged)
    with pytest.raises(DataError, match=r"output.jsonl:2: this line is no row of an output. Nothing is changed"):
        OutputFile(path)
    assert path.read_bytes() == damaged


def test_a_disk_that_is_full_leaves_the_rows_so_far(tmp_path: Path) -> None:
    path = tmp_path / OUTPUT
    output = OutputFile(path)
    output.append([answer(row) for row in range(10)])
    before, limits = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    usual = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 100, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            output.append([answer(row) for row in range(10, 20)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, usual)
    assert path.read_bytes() == before
    output.append([answer(10)])
    output.close()
    assert rows(path) == [(row, 0) for row in range(11)]


def test_an_output_of_something_else_is_refused_with_both_values(tmp_path: Path) -> None:
    identity = {"rollout.temperature": 1.0, "train.seed": 1}
    claim(tmp_path, identity)
    claim(tmp_path, identity)
    with pytest.raises(ConfigError, match=r"rollout\.temperature: 1\.0 there, 0\.5 here") as refused:
        claim(tmp_path, {**identity, "rollout.temperature": 0.5})
    assert "train.seed" not in str(refused.value)
    (tmp_path / FILE).unlink()
    (tmp_path / OUTPUT).write_text("mine\n")
    with pytest.raises(ConfigError, match=r"no generation\.json says what it was made with: it is not overwritten"):
        claim(tmp_path, identity)
    assert (tmp_path / OUTPUT).read_text() == "mine\n"


def task(number: int, count: int, last: int | None = None) -> dict[str, str]:
    return {ID: str(number), COUNT: str(count), LAST: str(count - 1 if last is None else last)}


def test_tasks_of_an_array_divide_the_rows_for_good(tmp_path: Path) -> None:
    shards = [shard_here(tmp_path, task(number, 3)) for number in range(3)]
    assert sorted(row for shard in shards for row in shard.rows(10)) == list(range(10))
    again = shard_here(tmp_path, task(2, 1, 2))  # --array=2
    assert again == RowShard(2, 3)
    with pytest.raises(ConfigError, match="are divided into 3 parts, numbered from 0"):
        shard_here(tmp_path, task(3, 4))
    with pytest.raises(ConfigError, match=r"divided into 3 parts, and this is not a task .* --array=0-2"):
        shard_here(tmp_path, {})
    with pytest.raises(ConfigError, match="--array has tasks up to 10, and there are 10, numbered from 0"):
        shard_here(tmp_path / "other", task(1, 10, 10))  # --array=1-10
    assert shard_here(tmp_path / "alone", {}) == RowShard()


def write_shard(root: Path, index: int, keys: list[tuple[int, int]], **changed: object) -> None:
    directory = RowShard(index, 2).directory(root)
    directory.mkdir(parents=True, exist_ok=True)
    claim(directory, {"rows": 4, "rollout.n_samples_per_prompt": 2, "shard": f"{index} of 2", **changed})
    output = OutputFile(directory / OUTPUT)
    output.append([answer(*key) for key in keys])
    output.close()


def test_shards_become_one_file_in_order_and_nothing_is_overwritten(tmp_path: Path) -> None:
    shard_here(tmp_path, task(0, 2))
    write_shard(tmp_path, 0, [(2, 1), (0, 0), (2, 0), (0, 1)])
    write_shard(tmp_path, 1, [(3, 0), (1, 1), (3, 1)])
    with pytest.raises(ConfigError, match="1 of 8 responses are not there yet, of the rows 1: run the job"):
        merge(tmp_path, None)
    assert merge(tmp_path, tmp_path / "partial.jsonl", partial=True)[1] == 7
    write_shard(tmp_path, 1, [(1, 0)])
    assert merge(tmp_path, None)[1] == 8
    assert rows(tmp_path / MERGED) == [(row, sample) for row in range(4) for sample in range(2)]
    with pytest.raises(ConfigError, match=r"merged.jsonl is there already, and is not overwritten"):
        merge(tmp_path, None)
    assert not [path for path in tmp_path.iterdir() if path.name.endswith(".tmp")]


def test_shards_that_do_not_belong_together_are_named(tmp_path: Path) -> None:
    shard_here(tmp_path, task(0, 2))
    write_shard(tmp_path, 0, [(0, 0)], **{"train.seed": 1})
    write_shard(tmp_path, 1, [(0, 0)], **{"train.seed": 2})
    with pytest.raises(ConfigError, match=r"do not belong together: train\.seed is 1 and 2"):
        merge(tmp_path, None)
    os.unlink(RowShard(1, 2).directory(tmp_path) / FILE)
    os.unlink(RowShard(1, 2).directory(tmp_path) / OUTPUT)
    write_shard(tmp_path, 1, [(0, 0)], **{"train.seed": 1})
    with pytest.raises(DataError, match="row 0, sample 0 is there twice"):
        merge(tmp_path, None)


def test_tools_are_other_prompts_and_their_absence_is_what_it_was(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    config = Config()
    before = identity_of(config, tmp_path)
    assert "data.tools_key" not in before
    config.data.tools_key = "tools"
    assert identity_of(config, tmp_path) == before | {"data.tools_key": "tools"}
