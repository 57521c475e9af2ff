"""`slurm-rlhf init`: what it reads from sinfo, what it asks, and that its files are good for a run."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from programs import write_program

from slurm_rlhf.cli import init
from slurm_rlhf.cli import main as cli
from slurm_rlhf.cli.init import NewRun, choose, script, toml
from slurm_rlhf.cluster.resources import best, parse_partitions
from slurm_rlhf.config.load import load_config
from slurm_rlhf.config.roles import running_roles
from slurm_rlhf.config.rules import rule_problems
from slurm_rlhf.errors import ConfigError

SINFO = """cpu*|100|(null)|2-00:00:00|64|up
gpu|16|gpu:h100:8(S:0-1)|1-00:00:00|96|up
small|4|gpu:a100:4|infinite|64+|up
old|2|gpu:v100:8|1-00:00:00|40|down
wide | 3 |gpu:l40:2 |infinite | 32|up
unlike text
"""
GPU = NewRun("mine", "models/m", "prompts.jsonl", 2, 8, 2, "gpu", "1-00:00:00", "project")


def silent(question: str, default: str) -> str:
    return default


def test_partitions_are_read_and_the_one_with_most_gpus_is_proposed() -> None:
    found = parse_partitions(SINFO)
    assert [(each.name, each.gpus, each.nodes, each.up) for each in found] == [
        ("cpu", 0, 100, True),
        ("gpu", 8, 16, True),
        ("small", 4, 4, True),
        ("old", 8, 2, False),
        ("wide", 2, 3, True),
    ]
    assert best(found[:3]) == found[1]
    assert best(found[:1]) == found[0]
    assert best([]) is None
    assert found[1].describe() == "gpu: 16 nodes of 8 GPUs and 96 CPUs, at most 1-00:00:00"
    assert found[0].describe().startswith("cpu (default): 100 nodes of no GPUs")


def test_answers_and_options_are_settled_and_what_cannot_be_is_refused() -> None:
    found = parse_partitions(SINFO)[:3]
    start = choose("mine", {"nodes": "2"}, found, silent)
    assert (start.partition, start.nodes, start.gpus, start.time) == ("gpu", 2, 8, "1-00:00:00")
    assert choose("mine", {"partition": "small"}, found, silent).time == ""  # infinite
    asked: list[str] = []
    choose("mine", {"model": "m"}, found, lambda question, default: asked.append(question) or default)  # type: ignore[func-returns-value]
    assert [question.splitlines()[-1] for question in asked] == [
        "Which one?",
        "How many nodes?",
        "GPUs per node?",
        "File with the prompts?",
    ]
    assert (choose("mine", {}, [], silent).gpus, choose("mine", {}, [], silent).partition) == (0, "")
    for given, message in (
        ({"partition": "gpuu"}, "no partition 'gpuu'; did you mean gpu?"),
        ({"nodes": "17"}, "--nodes takes a whole number from 1 to 16, got '17'"),
        ({"gpus_per_node": "x"}, "--gpus_per_node takes a whole number from 0 to 8, got 'x'"),
        ({"tensor_parallel_size": "3"}, "--tensor_parallel_size=3 does not divide the 8 GPUs of a node"),
    ):
        with pytest.raises(ConfigError) as caught:
            choose("mine", given, found, silent)
        assert message in str(caught.value)


@pytest.mark.parametrize(
    "start", [GPU, replace(GPU, nodes=3, gpus=6), replace(GPU, nodes=1, gpus=1, tensor_parallel_size=1)]
)
def test_the_configuration_is_sound_on_any_number_of_gpus(start: NewRun, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(toml(start))
    config = load_config(tmp_path / "mine.toml")
    assert list(rule_problems(config)) == []
    assert {role.ranks(config) for role in running_roles(config)} == {start.nodes * start.gpus}


def test_the_batch_script_is_one(tmp_path: Path) -> None:
    text = script(GPU)
    for line in ("--gres=gpu:8", "--partition=gpu", "--account=project", "--time=1-00:00:00", "--requeue"):
        assert f"#SBATCH {line}\n" in text
    assert "--partition" not in script(replace(GPU, partition=""))
    assert "--gres" not in script(replace(GPU, gpus=0))
    (tmp_path / "mine.sh").write_text(text)
    assert subprocess.run(["bash", "-n", tmp_path / "mine.sh"], check=False).returncode == 0


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """A directory to stand in, and a function that puts an `sinfo` on PATH."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/nowhere")

    def sinfo(body: str) -> None:
        write_program(tmp_path / "bin" / "sinfo", f"#!/bin/bash\n{body}\n")

    return sinfo


def test_without_slurm_two_files_and_what_to_do_next(
    here: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["init", "mine", "--yes"]) == 0
    out = capsys.readouterr().out
    assert sorted(name for name in os.listdir() if name != "bin") == ["mine.toml", "mine_reward.py"]
    assert "1. put a Hugging Face model into models/MY_MODEL" in out
    assert "2. write your prompts to prompts.jsonl" in out
    assert out.rstrip().endswith("5. slurm-rlhf train mine.toml")
    before = Path("mine.toml").read_text()
    assert cli.main(["init", "mine", "--yes"]) == 2
    assert "mine.toml, mine_reward.py exists already" in capsys.readouterr().err
    assert Path("mine.toml").read_text() == before


def test_with_slurm_a_batch_script_for_its_partition(
    here: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    here(f"echo '{SINFO}'")
    assert cli.main(["init", "mine", "--yes", "--nodes=2", "--time=12:00:00"]) == 0
    assert "sbatch mine.sh" in capsys.readouterr().out
    text = Path("mine.sh").read_text()
    assert "#SBATCH --partition=gpu\n" in text
    assert "#SBATCH --time=12:00:00\n" in text


def test_a_slurm_that_fails_is_a_warning(here: Callable[[str], None], capsys: pytest.CaptureFixture[str]) -> None:
    here("echo 'Unable to contact slurm controller' >&2; exit 1")
    assert cli.main(["init", "mine", "--yes"]) == 0
    assert "warning: sinfo failed: Unable to contact slurm controller" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give the run a name"),
        (["a", "b"], "give the run a name"),
        (["a/b"], "give the run a name"),
        (["mine", "--modle=x"], "unknown option 'modle'; did you mean model?"),
        (["mine", "--model"], "--model takes a value: directory of the Hugging Face model"),
    ],
)
def test_wrong_words(
    words: list[str], message: str, here: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["init", *words]) == 2
    assert message in capsys.readouterr().err
    assert sorted(os.listdir()) == ["bin"]


def test_the_reward_runs_as_it_is(here: Callable[[str], None]) -> None:
    cli.main(["init", "mine", "--yes"])
    made: dict[str, object] = {}
    exec(Path("mine_reward.py").read_text(), made)
    answer = made["reward_func"](["it is 5", "it is 6", ""], ["5", "5", None])  # type: ignore[operator]
    assert answer["rewards"] == [1.0, 0.0, 0.0]


def test_an_answer_counts_and_an_empty_one_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for answer, counts in ((" mine ", "mine"), ("", "given")):
        monkeypatch.setattr("builtins.input", lambda question, answer=answer: answer)
        assert init._question("which", "given") == counts
