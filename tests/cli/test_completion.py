"""Completion in a real bash: commands, keys, choices, topics, files."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from waiting import HANG_S

from slurm_rlhf.cli import main as cli
from slurm_rlhf.config.keys import all_keys


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from slurm_rlhf.cli.docs import script

    file = tmp_path_factory.mktemp("completion") / "script"
    file.write_text(script())
    return file


def completed(script: Path, *words: str) -> list[str]:
    """What bash offers for the last of `words`, which bash has cut at `=`."""
    line = " ".join(f"'{word}'" for word in words)
    given = f"COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}"
    call = f"source {script}; {given}; _slurm_rlhf; printf '%s\\n' ${{COMPREPLY[@]}}"
    done = subprocess.run(["bash", "-c", call], capture_output=True, text=True, check=True, timeout=HANG_S)
    return done.stdout.split()


def test_commands(script: Path) -> None:
    assert completed(script, "slurm-rlhf", "") == list(cli.COMMANDS)
    assert completed(script, "slurm-rlhf", "sta") == ["status"]


def test_keys(script: Path) -> None:
    found = completed(script, "slurm-rlhf", "train", "run.toml", "--")
    assert found == ["--help", *(f"--{name}=" for name in all_keys())]
    assert completed(script, "slurm-rlhf", "train", "run.toml", "--algo.kl.t") == ["--algo.kl.target="]


@pytest.mark.parametrize(
    "words", [("--sync.backend", "=", "gl"), ("--sync.backend", "gl"), ("--vllm.sync_mode", "=", "dra")]
)
def test_choices_of_a_key(script: Path, words: tuple[str, ...]) -> None:
    assert completed(script, "slurm-rlhf", "train", "run.toml", *words) in (["gloo"], ["drain"])


def test_an_equals_sign_offers_every_choice(script: Path) -> None:
    assert completed(script, "slurm-rlhf", "train", "run.toml", "--vllm.enforce_eager", "=") == ["true", "false"]


def test_topics_and_files(script: Path) -> None:
    assert completed(script, "slurm-rlhf", "docs", "tro") == ["trouble"]
    assert completed(script, "slurm-rlhf", "train", "ru") == []  # files: bash's own, by -o default


def test_another_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", "fish"]) == 2
    assert "usage: slurm-rlhf completion bash|zsh" in capsys.readouterr().err
    assert cli.main(["completion", "zsh"]) == 0
    assert capsys.readouterr().out.startswith("autoload")
