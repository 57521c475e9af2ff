"""Rows that are wrong become errors of their own; a job that is wrong is refused; engines go on every GPU."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet
from sampled_responses import IDS, response

from slurm_rlhf.cli.generate import refuse_many_processes
from slurm_rlhf.config.check import check_generate
from slurm_rlhf.config.schema import Config
from slurm_rlhf.data.prompts import BadRow
from slurm_rlhf.data.rows import read_rows, require_column
from slurm_rlhf.errors import ConfigError, DataError, ModelError, PlacementError, RewardError
from slurm_rlhf.generate import model_source
from slurm_rlhf.generate.job import engine_config, engines_everywhere
from slurm_rlhf.generate.model_source import Source, find_source
from slurm_rlhf.generate.rows import Scores, read_dataset
from slurm_rlhf.placement.topology import CPU, GPU, Node, Topology
from slurm_rlhf.records import Prompt


def config_of(tmp_path: Path, model: Path, lines: list[str]) -> Config:
    config = Config(run_dir=str(tmp_path / "out"))
    config.generate.dataset = str(tmp_path / "rows.jsonl")
    config.generate.model_name_or_path = str(model)
    config.data.max_len, config.rollout.max_new_tokens = 32, 8
    Path(config.generate.dataset).write_text("".join(f"{line}\n" for line in lines))
    return config


def test_each_bad_row_says_what_is_wrong_and_good_ones_are_tokenized(tmp_path: Path, model: Path) -> None:
    good = json.dumps({"input": "1+1=", "label": "2"})
    lines = [good, "{torn", '{"other": 1}', '{"input": ""}', json.dumps({"input": "9" * 25}), '{"input": 3}', good]
    config = config_of(tmp_path, model, lines)
    count, prompts = read_dataset(config, model)
    found = list(prompts(range(count)))
    assert sorted(each.index for each in found) == list(range(7))
    why = {each.index: str(each.error) for each in found if isinstance(each, BadRow)}
    assert sorted(why) == [1, 2, 3, 4, 5]
    assert "rows.jsonl:2: not valid JSON" in why[1]
    assert "rows.jsonl:3: no column 'input' (columns: other)" in why[2]
    assert why[3].endswith("rows.jsonl:4: the prompt is empty: give 'input' some text")
    assert "rows.jsonl:5: the prompt is longer than 24 tokens" in why[4]
    assert "data.max_len = 32" in why[4]
    assert "rows.jsonl:6: 'input' must be a string, got int" in why[5]
    assert [each.label for each in found if isinstance(each, Prompt)] == ["2", "2"]


def test_a_job_of_several_mpi_processes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_many_processes("generate")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="each would answer all rows"):
        refuse_many_processes("generate")


def test_a_column_that_no_row_has_is_an_error_of_the_job(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    for text, said in (
        (
            '{"question": "1+1=", "id": 1}\nnothing',
            r"no row has a column 'input' \(columns: question, id\): set data.input_key",
        ),
        ("nothing", r"no row can be read; the first: .*rows\.jsonl:1: not valid JSON"),
        ("", "the file holds no rows"),
    ):
        file.write_text(f"{text}\n")
        with pytest.raises(DataError, match=said):
            require_column(list(read_rows(file)), "input", file)


def test_parquet_is_read_as_its_rows_are(tmp_path: Path) -> None:
    file = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.table({"input": ["1+1=", "2+2="], "label": [2, 4]}), file)
    rows = [{"input": "1+1=", "label": 2}, {"input": "2+2=", "label": 4}]
    assert list(read_rows(file)) == [(f"{file}: row {number}", row) for number, row in enumerate(rows)]
    file.write_bytes(b"torn")
    with pytest.raises(DataError, match="no Parquet file that can be read"):
        list(read_rows(file))


def test_pyarrow_is_asked_for_where_it_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "rows.parquet"
    file.write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match="reading Parquet needs pyarrow, which is not installed: pip install"):
        list(read_rows(file))


def test_keys_that_make_no_job_are_named_together(tmp_path: Path, model: Path) -> None:
    config = config_of(tmp_path, model, ["{}"])
    check_generate(config)
    config.generate.dataset, config.rollout.max_new_tokens = str(tmp_path / "none.jsonl"), 32
    config.reward.model_name_or_path = "reward"
    (tmp_path / "out" / "checkpoints").mkdir(parents=True)
    with pytest.raises(ConfigError) as refused:
        check_generate(config)
    for part in (
        f"generate.dataset: no such file: {tmp_path / 'none.jsonl'}",
        "data.max_len = 32 leaves no room for a prompt, because of rollout.max_new_tokens = 32",
        "reward.model_name_or_path: responses are not scored by a reward model here",
        "is the directory of a training run",
    ):
        assert part in str(refused.value)


def test_a_model_is_found_by_directory_and_by_its_name_in_the_cache(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(tmp_path, model, ["{}"])
    assert find_source(config, tmp_path).model == model
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    folder = tmp_path / "hub" / "models--tiny--sums"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc")
    (folder / "snapshots").mkdir()
    (folder / "snapshots" / "abc").symlink_to(model)
    config.generate.model_name_or_path = str(Path.cwd() / "tiny" / "sums")  # as `tiny/sums` is read
    assert find_source(config, tmp_path).model == folder / "snapshots" / "abc"
    config.generate.model_name_or_path = str(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"no Hugging Face directory .*, no run directory .* and no checkpoint"):
        find_source(config, tmp_path)


def test_engines_fill_all_gpus_and_stay_on_their_node() -> None:
    topology = Topology((Node("a", 4), Node("b", 3), Node("c", 1)), GPU)
    ranks = engines_everywhere(topology, 2)
    assert [(g.engine, g.node, g.gpus, g.ranks) for g in ranks.tp_groups] == [
        (0, "a", (0, 1), (0, 1)),
        (1, "a", (2, 3), (2, 3)),
        (2, "b", (0, 1), (4, 5)),
    ]
    config = Config()
    config.train.colocate_all = config.ds.enable_sleep = True  # as the run that trained the model had them
    made = engine_config(config, Path("model"), ranks, Path("job"))
    assert [made.vllm.num_engines, made.vllm.num_nodes, made.train.colocate_all, made.ds.enable_sleep] == [3, 2, 0, 0]
    with pytest.raises(PlacementError, match=r"engines_per_node = 2 .* need 4 GPUs, and b has 3"):
        engines_everywhere(topology, 2, 2)
    with pytest.raises(PlacementError, match="tensor_parallel_size = 8, and the largest node has 4 GPUs"):
        engines_everywhere(topology, 8)
    here = engines_everywhere(Topology((Node("a", 0), Node("b", 0)), CPU), 2, 2)
    assert [(g.node, g.ranks) for g in here.tp_groups] == [("a", (0, 1)), ("a", (2, 3)), ("b", (4, 5)), ("b", (6, 7))]


REWARD = """
def reward_func(queries, prompts, labels, **kwargs):
    return [1.0 / float(label) for label in labels]
"""


def scored(scores: Scores, *labels: str) -> list[tuple[float | None, str]]:
    prompts = [Prompt(row, "1/x", IDS, label) for row, label in enumerate(labels)]
    return scores(prompts, [response(prompt.index, "x") for prompt in prompts])


def test_a_row_that_the_reward_function_cannot_score_is_one_bad_row(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    (tmp_path / "reward.py").write_text(REWARD)
    config = Config()
    config.reward.remote_url = str(tmp_path / "reward.py")
    scores = Scores.of(config, tmp_path / "reward.log")
    request.addfinalizer(scores.close)
    with pytest.raises(RewardError, match="ZeroDivisionError"):  # it has never scored anything: it is the function
        scored(scores, "0")
    found = scored(scores, "2", "0", "4")
    assert [score for score, _ in found] == [0.5, None, 0.25]
    assert "ZeroDivisionError" in found[1][1]
    assert scored(Scores(None), "0") == [(None, "")]


def test_what_an_interrupted_export_has_left_is_removed_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Source(tmp_path / "made", tmp_path / "checkpoint", tmp_path / "base", "fp32")
    source.model.mkdir()
    (source.model / "half").touch()
    seen: list[bool] = []

    def run(command: list[str], **words: object) -> subprocess.CompletedProcess[bytes]:
        seen.append((source.model / "half").exists())
        source.model.mkdir(exist_ok=True)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(model_source.subprocess, "run", run)
    assert model_source.provide(source, print, tmp_path / "log") == source.model
    assert model_source.provide(source, print, tmp_path / "log") == source.model  # which is done already
    shutil.rmtree(source.model)
    assert model_source.provide(source, print, tmp_path / "log") == source.model
    assert seen == [False, False]
