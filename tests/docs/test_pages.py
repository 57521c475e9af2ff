"""The pages of the documentation: how they are shown, the glossary of metrics, and every command in them."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from glossary import explained, unexplained
from programs import on_terminal
from recorded_run import write_run
from shown_commands import ROOT, TEXTS
from training_runs import workspace

import slurm_rlhf
from slurm_rlhf.cli import main as cli
from slurm_rlhf.cli.commands import commands
from slurm_rlhf.config.keys import all_keys, read_as
from slurm_rlhf.docs.pages import TOPICS, page
from slurm_rlhf.observe.run_log import read_rows


def test_without_a_topic_the_pages_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["docs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "usage: slurm-rlhf docs [TOPIC]"
    assert [line.split()[0] for line in lines[2:]] == list(TOPICS)


@pytest.mark.parametrize("word", ["data_and_reward", "data-and-reward", "data_and_reward.md"])
def test_a_page_into_a_pipe_is_markdown(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["docs", word]) == 0
    assert capsys.readouterr().out == page("data_and_reward")


def test_a_topic_that_is_not_there_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["docs", "algorithm"]) == 2
    error = capsys.readouterr().err
    assert "there is no page 'algorithm'; did you mean algorithms?" in error
    assert "trouble" in error
    assert cli.main(["docs", "first_run", "trouble"]) == 2


DOCS = [sys.executable, "-m", "slurm_rlhf.cli", "docs"]


def test_on_a_terminal_it_is_formatted() -> None:
    text = on_terminal([*DOCS, "resume"], COLUMNS="90", TERM="xterm")
    assert "\x1b[" in text
    assert "# Resume" not in text
    assert "Resume and requeue" in text


def test_on_a_terminal_no_name_in_a_table_is_cut() -> None:
    """Names longer than a column: of trackers' files, and of keys."""
    text = on_terminal([*DOCS, "keys"], COLUMNS="80", TERM="xterm")
    assert "rollout.n_samples_per_p" in text  # it goes on in the next line
    assert "…" not in text


# --- metrics ----------------------------------------------------------------------------------------------------------


PACKAGE = Path(slurm_rlhf.__file__).parent


def test_a_name_that_is_not_explained_is_found(tmp_path: Path) -> None:
    assert unexplained(["reward", "reward/mine", "perf/engine/12/busy_s", "eval/a/b/pass@4"]) == []
    assert unexplained(["rewards", "perf/engine/busy_s", "eval/a/median"]) == [
        "eval/a/median",
        "perf/engine/busy_s",
        "rewards",
    ]
    for row in read_rows(write_run(tmp_path / "run").metrics):
        assert unexplained(row) == []


def test_each_name_is_explained_once_and_of_the_code() -> None:
    assert len(explained()) > 80
    assert len(set(explained())) == len(explained())
    code = "\n".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py") if "docs" not in path.parts)
    for name in explained():
        words = [
            word
            for part in name.split("/")
            for word in re.split(r"[A-Z]+|@|^(?:actor|critic|first)_", part)
            if len(word) > 2
        ]
        assert [word for word in words if word.strip("_") not in code] == [], name


def test_what_the_report_draws_is_a_metric() -> None:
    """But for a plot of what nothing records, which would never be seen."""
    plots = (
        (PACKAGE / "report" / "page" / "curves.js").read_text(encoding="utf-8").split("const PLOTS")[1].split("];")[0]
    )
    named = set(re.findall(r'"?([a-z][\w/]+)"?: "', plots)) - {"absent"}
    assert len(named) > 30
    assert unexplained(named) == []


# --- commands ---------------------------------------------------------------------------------------------------------


COMMAND = re.compile(r"^(?:slurm-rlhf|sbatch|bash) ")

SCRIPTS = {
    "sbatch/quickstart.sh": ("runs/test_sbatch_quickstart.py", "quickstart.sh"),
    "sbatch/environment.sh": ("runs/test_sbatch_environment.py", "environment.sh"),
    "sbatch/gpu_check.sh": ("kit/test_report.py", "gpu_check.sh"),
    "sbatch/generate.sh": ("runs/test_slurm_generate.py", "generate.sh"),
    "sbatch/pipeline.sh": ("cli/test_pipeline.py", "pipeline.sh"),
    "sbatch/sft.sh": ("runs/test_slurm_stages.py", "sft.sh"),
    "sbatch/seeds.sh": ("runs/test_slurm_jobs.py", "seeds.sh"),
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
    assert name in commands()
    if name == "docs" or (name in ("plan", "check") and rest):
        rest = [str(mine) if word in ("FILE.toml", "mine.toml") else word for word in rest if word != "TOPIC"]
        here = [f"--actor.model_name_or_path={mine.parent / 'model'}"] if "sbatch/ppo_32b.toml" in rest else []
        assert cli.main([name, *rest, *here]) == 0, capsys.readouterr().err
        return
    assert cli.main([*([name, rest[0]] if name == "bench" else [name]), "--help"]) == 0
    help_page = capsys.readouterr().out
    for word in rest[: [*rest, "--"].index("--")]:
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
