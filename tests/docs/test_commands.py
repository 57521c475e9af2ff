"""Every command that the documentation shows: run here where it starts nothing large, else read word by word."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest
from shown_commands import ROOT, TEXTS
from training_runs import workspace

from slurm_rlhf.cli import main as cli
from slurm_rlhf.config.keys import all_keys, read_as

COMMAND = re.compile(r"^(?:slurm-rlhf|sbatch|bash) ")

SCRIPTS = {
    "sbatch/quickstart.sh": ("runs/test_sbatch_quickstart.py", "quickstart.sh"),
    "sbatch/environment.sh": ("runs/test_sbatch_environment.py", "environment.sh"),
    "sbatch/gpu_check.sh": ("kit/test_report.py", "gpu_check.sh"),
    "sbatch/generate.sh": ("runs/test_slurm_generate.py", "generate.sh"),
    "sbatch/seeds.sh": ("runs/test_slurm_doors.py", "seeds.sh"),
    "sbatch/ppo_7b.sh": ("runs/test_sbatch_ppo.py", '"ppo_7b"'),
    "sbatch/ppo_32b.sh": ("runs/test_sbatch_ppo.py", "ppo_32b.sh"),
    "tests/run.sh": ("kit/test_report.py", "RUN_SH"),
}
"""Script -> (the tests that run it, what they call it)."""


def shown() -> list[tuple[str, str]]:
    """(page, command), of indented lines and of what stands in backticks; a comment behind it is cut off."""
    found = []
    for name, text in TEXTS.items():
        lines = [line.strip() for line in re.findall(r"^ {4}(\S.*)$", text, re.MULTILINE)]
        lines += re.findall(r"`([^`\n]+)`", text)
        found += [(name, re.split(r"\s{2,}#|\s#", line)[0].strip()) for line in lines if COMMAND.match(line)]
    return sorted(set(found))


SHOWN = shown()


def words_of(command: str) -> list[str]:
    return shlex.split(re.sub(r"\[(.*?)\]", r"\1", command))


@pytest.fixture(scope="module")
def mine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return workspace(tmp_path_factory.mktemp("docs"))


def test_commands_are_found() -> None:
    assert len(SHOWN) > 25
    assert {"plan", "check", "docs", "status"} <= {command.split()[1] for _, command in SHOWN if command[:2] == "sl"}


@pytest.mark.parametrize("where,command", [each for each in SHOWN if each[1].startswith("slurm-rlhf ")])
def test_a_command_is_one(
    where: str, command: str, mine: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`plan`, `check` and `docs` run as they stand, on the tests' model; of the others each option is known."""
    monkeypatch.chdir(ROOT)
    name, *rest = words_of(command)[1:]
    assert name in cli.COMMANDS
    if name == "docs" or (name in ("plan", "check") and rest):
        rest = [str(mine) if word in ("FILE.toml", "mine.toml") else word for word in rest if word != "TOPIC"]
        here = [f"--actor.model_name_or_path={mine.parent / 'model'}"] if "sbatch/ppo_32b.toml" in rest else []
        assert cli.main([name, *rest, *here]) == 0, capsys.readouterr().err
        return
    assert cli.main([*([name, rest[0]] if name == "bench" else [name]), "--help"]) == 0
    help_page = capsys.readouterr().out
    for word in rest:
        option = word.partition("=")[0]
        known = option[2:] in all_keys() or option[2:] in read_as() or f"{option} " in help_page
        assert not option.startswith("--") or option == "--help" or known, option


@pytest.mark.parametrize("where,command", [each for each in SHOWN if not each[1].startswith("slurm-rlhf ")])
def test_a_script_is_one_that_the_tests_run(where: str, command: str) -> None:
    scripts = [word for word in words_of(command) if word.endswith(".sh")]
    if not scripts:
        assert all(word.startswith("--") or word == "..." for word in words_of(command)[1:])  # sbatch's own options
        return
    (script,) = scripts
    assert subprocess.run(["bash", "-n", ROOT / script], check=False).returncode == 0
    tests, name = SCRIPTS[script]
    assert name in (ROOT / "tests" / tests).read_text(encoding="utf-8")
