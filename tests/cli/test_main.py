"""The `slurm-rlhf` command: help, errors, exit codes, speed, completion, and text that moves no cursor."""

from __future__ import annotations

import errno
import importlib
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from loaded_packages import LIBRARIES, packages_loaded
from waiting import HANG_S

from slurm_rlhf import __version__
from slurm_rlhf.cli import bench, generate, mpi, plan
from slurm_rlhf.cli import main as cli
from slurm_rlhf.cli.commands import commands
from slurm_rlhf.cli.main import guarded, main
from slurm_rlhf.cli.preflight import show as show_examination
from slurm_rlhf.cli.preflight import tell
from slurm_rlhf.cli.status import show
from slurm_rlhf.cluster.processes import Session
from slurm_rlhf.config.keys import all_keys
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import RemoteError, RewardError, RoleDied, RunError
from slurm_rlhf.generate.job import GenerateJob
from slurm_rlhf.nodes.report import WARNING, Check, Finding, Report
from slurm_rlhf.parity.verdicts import Line
from slurm_rlhf.run.reporting import Reporting
from slurm_rlhf.run_directory import RunDirectory
from slurm_rlhf.stages.record import StageRecord

TOP = [name for name in commands() if " " not in name]
WITHOUT_FILE = {"status", "cancel", "docs", "migrate", "completion", "init", "report"}
WITHOUT_FILE |= {"pipeline", "serve-reward", "serve-env"}
"""Commands whose argument is a run and not a configuration."""
OTHERS = {"bench", "check-parity", "generate", "eval"}
"""Commands whose tests have their help pages."""

COMMAND = [sys.executable, "-c", "import sys; from slurm_rlhf.cli.main import main; sys.exit(main())"]


def test_entry_point_is_main() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    module, _, function = project["scripts"]["slurm-rlhf"].partition(":")
    assert getattr(importlib.import_module(module), function) is cli.main
    assert project["version"] == __version__


def test_overview(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: slurm-rlhf COMMAND FILE.toml")
    for name in TOP:
        assert re.search(rf"^  {name} +{re.escape(commands()[name].summary)}$", out, re.MULTILINE)
    assert cli.main([]) == 2
    assert capsys.readouterr().err == out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"slurm-rlhf {__version__}\n"


@pytest.mark.parametrize(("before", "after"), [(0o000, 0o007), (0o020, 0o027), (0o022, 0o022), (0o002, 0o002)])
def test_where_the_umask_lets_others_write_they_may_do_nothing(before: int, after: int) -> None:
    usual = os.umask(before)
    try:
        cli.main(["--version"])
    finally:
        assert os.umask(usual) == after


@pytest.mark.parametrize("name", sorted(set(TOP) - WITHOUT_FILE - OTHERS))
@pytest.mark.parametrize("columns", [80, 200])
def test_help_of_a_command(
    name: str, columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert cli.main([name, "no.toml", "--help"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"usage: slurm-rlhf {name} FILE.toml")
    assert re.search(r"^  actor +num_nodes, |^  actor +model_name_or_path, ", out, re.MULTILINE)
    assert len(out.splitlines()) <= (90 if columns == 80 else 75)
    assert max(map(len, out.splitlines())) <= 120
    assert cli.main([name, "--help", "actor"]) == 0
    out, err = capsys.readouterr()
    key, default = ("model_name_or_path PATH", "[empty]") if name in ("sft", "rm", "dpo") else ("num_nodes INT", "[1]")
    assert re.search(rf"^  --actor\.{key}\s", out, re.MULTILINE)
    assert default in out
    assert "--critic." not in out
    assert err == ""
    assert max(map(len, out.splitlines())) <= 120


@pytest.mark.parametrize("name", ["cancel", "status"])
def test_help_of_a_command_on_a_run(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([name, "--help"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"usage: slurm-rlhf {name} RUN")
    assert max(map(len, out.splitlines())) <= 120


def test_every_key_is_in_some_help(capsys: pytest.CaptureFixture[str]) -> None:
    for name in TOP:
        cli.main([name, "-h", "all"])
    out = capsys.readouterr().out
    assert [key for key in all_keys() if f"  --{key} " not in out] == []


def test_help_on_what_is_no_key_names_the_nearest_and_the_groups(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "--help", "actr"]) == 2
    assert "no help on 'actr'; did you mean actor? (groups: actor, algo, " in capsys.readouterr().err
    assert cli.main(["train", "--help", "run"]) == 0
    assert "--run_dir PATH" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trane"], "slurm-rlhf: error: unknown command 'trane'; did you mean train? (commands: init, "),
        (["xyz"], "slurm-rlhf: error: unknown command 'xyz' (commands: init, "),
        (["train"], "slurm-rlhf: error: the TOML file comes first: `slurm-rlhf init NAME` writes one"),
        (["train", "--dry_run"], "the TOML file comes first"),
        (["sft", "--train.seed=1", "x.toml"], "the TOML file comes first\nusage: slurm-rlhf sft"),
        (["train", "no.toml"], "slurm-rlhf: error: no.toml: no such file"),
    ],
)
def test_bad_words(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert "Traceback" not in err


def failing(error: BaseException) -> Callable[..., int]:
    def work(*_: object) -> int:
        raise error

    return work


@pytest.mark.parametrize(
    ("error", "code", "shown"),
    [
        (RewardError("reward.py:3: x"), 2, "slurm-rlhf: error: reward.py:3: x\n"),
        (RoleDied("critic 0 died"), 1, "slurm-rlhf: error: critic 0 died\n"),
        (RemoteError("y", remote_traceback="secret", user_error=True), 2, "slurm-rlhf: error: y\n"),
        (RemoteError("y", remote_traceback="secret"), 1, "slurm-rlhf: error: y\n"),
        (KeyboardInterrupt(), 130, "slurm-rlhf: interrupted\n"),
        (PermissionError(13, "Permission denied", "/f"), 1, "slurm-rlhf: error: [Errno 13] Permission denied: '/f'\n"),
        (SystemError("z"), 1, "SystemError: z\nslurm-rlhf: this is a bug in slurm_rlhf, not in your input\n"),
    ],
)
def test_exit_codes(
    error: BaseException, code: int, shown: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "show_plan", failing(error))
    assert cli.main(["plan", "x.toml"]) == code
    err = capsys.readouterr().err
    assert err.endswith(shown)
    assert ("Traceback" in err) == isinstance(error, SystemError)


def test_help_loads_none_of_the_libraries() -> None:
    assert not LIBRARIES & packages_loaded([*COMMAND, "train", "--help"])


def test_a_reader_that_leaves_gets_no_traceback() -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([*COMMAND, "train", "--help"], stdout=write, stderr=subprocess.PIPE, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, b"")


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ('raise RuntimeError("half installed")', "import NAME"),
        ("def (", "import NAME"),
        ("x = 1", "from NAME import y"),
        ("x = 1", "import NAME.y"),
        ("x = 1", "import NAME; NAME.y"),
        ("import nowhere_at_all", "import NAME"),
    ],
)
def test_a_broken_module_on_pythonpath_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], body: str, wanted: str
) -> None:
    name = f"shadow_{len(body)}_{len(wanted)}"
    (tmp_path / f"{name}.py").write_text(body)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"/elsewhere:{tmp_path}")
    assert guarded(lambda: exec(wanted.replace("NAME", name)) or 0) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"slurm-rlhf: error: a module in {tmp_path} does not work here: ")
    assert f"Take {tmp_path} out of PYTHONPATH" in err
    assert "Traceback" not in err


def test_an_error_that_names_no_file_names_its_line_and_what_replaces_calls(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`time.sleep` fails like this under libfaketime with FAKETIME_DONT_FAKE_MONOTONIC=1."""

    def sleep() -> int:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.delenv("LD_PRELOAD", raising=False)
    assert cli.guarded(sleep) == 1
    bare = capsys.readouterr().err
    assert "Invalid argument, from `raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))` (" in bare
    assert bare.endswith(f"{Path(__file__).name}:{sleep.__code__.co_firstlineno + 1})\n")
    monkeypatch.setenv("LD_PRELOAD", "/usr/lib/libfaketime.so.1")
    assert cli.guarded(sleep) == 1
    assert capsys.readouterr().err == (
        f"{bare.rstrip()}. LD_PRELOAD = /usr/lib/libfaketime.so.1 replaces calls of the system: start without it\n"
    )


def test_a_limit_of_address_space_is_no_bug(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    work = failing(MemoryError())
    assert cli.guarded(work) == 1
    assert capsys.readouterr().err.endswith("this is a bug in slurm_rlhf, not in your input\n")
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (3 << 29, 3 << 29))
    assert cli.guarded(work) == 1
    err = capsys.readouterr().err
    assert "slurm-rlhf: a process may have 1.5 GiB of address space here (`ulimit -v`, RLIMIT_AS)" in err
    assert "this is a bug" not in err


def test_an_error_of_our_own_stays_a_bug_whatever_is_on_pythonpath(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    assert guarded(lambda: int("x")) == 1
    assert "this is a bug in slurm_rlhf" in capsys.readouterr().err


# --- completion -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from slurm_rlhf.cli.docs import script

    file = tmp_path_factory.mktemp("completion") / "script"
    file.write_text(script())
    return file


def completed(script: Path, *words: str) -> list[str]:
    """Return the words that bash offers for the last of `words`, which bash has cut at `=`."""
    line = " ".join(f"'{word}'" for word in words)
    given = f"COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}"
    call = f"source {script}; {given}; _slurm_rlhf; printf '%s\\n' ${{COMPREPLY[@]}}"
    done = subprocess.run(["bash", "-c", call], capture_output=True, text=True, check=True, timeout=HANG_S)
    return done.stdout.split()


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (("",), TOP),
        (("sta",), ["status"]),
        (("train", "run.toml", "--"), ["--help", *(f"--{name}=" for name in all_keys())]),
        (("train", "run.toml", "--algo.kl.t"), ["--algo.kl.target="]),
        (("train", "run.toml", "--sync.backend", "=", "gl"), ["gloo"]),
        (("train", "run.toml", "--sync.backend", "gl"), ["gloo"]),
        (("train", "run.toml", "--vllm.enforce_eager", "="), ["true", "false"]),
        (("docs", "tro"), ["trouble"]),
        (("train", "ru"), []),  # files: bash's own, by -o default
    ],
    ids=lambda each: "-".join(each[:4]),
)
def test_bash_completes_commands_keys_choices_and_topics(
    script: Path, words: tuple[str, ...], offered: list[str]
) -> None:
    assert completed(script, "slurm-rlhf", *words) == offered


def test_another_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", "fish"]) == 2
    assert "usage: slurm-rlhf completion bash|zsh" in capsys.readouterr().err
    assert cli.main(["completion", "zsh"]) == 0
    assert capsys.readouterr().out.startswith("autoload")


# --- terminal ---------------------------------------------------------------------------------------------------------


WILD, TAMED = "a\x1b]0;title\x07\x1b[2J", r"a\x1b]0;title\x07\x1b[2J"
EXAMINED = Report(("n1",), (Check("disk", "fine", (Finding(WARNING, ("n1",), WILD, "mend it"),)),), 0.1)


@pytest.mark.parametrize(
    "printed",
    [
        lambda root: guarded(failing(RunError(WILD))),
        lambda root: guarded(failing(OSError(1, "refused", WILD))),
        lambda root: guarded(failing(OSError(WILD))),
        lambda root: guarded(failing(ValueError(WILD))),
        lambda root: show(iter([[WILD]])),
        lambda root: show_examination(EXAMINED, as_json=False),
        lambda root: tell(EXAMINED),
        lambda root: GenerateJob.tell(SimpleNamespace(config=Config()), WILD),  # type: ignore[arg-type]
        lambda root: StageRecord.say(
            SimpleNamespace(_name="sft", _world=SimpleNamespace(rank=0), _paths=SimpleNamespace(root=root / "none")),  # type: ignore[arg-type]
            WILD,
        ),
        lambda root: mpi._refuse(SimpleNamespace(broadcast=lambda message: None), RunError(WILD)),  # type: ignore[arg-type]
        lambda root: Reporting(Config(run_dir=str(root)), RunDirectory(root), {"actor": 1}).note(WILD),
    ],
)
def test_text_of_others_is_escaped(
    printed: Callable[[Path], Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    printed(tmp_path)
    out, err = capsys.readouterr()
    assert TAMED in out + err
    assert not {"\x1b", "\x07"} & set(out + err)


def warned(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`generate`, with a warning of what was seen of its node."""
    monkeypatch.setattr(generate, "examine_nodes", lambda *_: (EXAMINED, None))
    with generate.engine_launcher(Config(), root, ()):
        pass


COMPARED = Line(WILD, "fp32", "failed", WILD, log=(WILD,))


@pytest.mark.parametrize(("printed", "times"), [(warned, 1), (lambda *_: bench._printed(iter([COMPARED]), 5), 3)])
def test_text_of_others_is_escaped_wherever_a_command_prints_it(
    printed: Callable[[Path, pytest.MonkeyPatch], None],
    times: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)  # the process that runs the tests keeps its own
    printed(tmp_path, monkeypatch)
    out = capsys.readouterr().out
    assert out.count(TAMED) >= times
    assert not {"\x1b", "\x07"} & set(out)


@pytest.mark.parametrize("status", ["failed", "running"])
def test_a_status_escapes_errors_logs_and_what_a_run_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], status: str
) -> None:
    """Running: it was cut off, so its logs are shown."""
    directory = RunDirectory(tmp_path)
    directory.make()
    Session(socket.gethostname(), 1 << 22, 0.0, "", "", "n1").write(tmp_path)
    summary = {"status": status, "steps": 1, "total_steps": 2, "error": WILD, "restarts": [WILD]}
    directory.summary.write_text(json.dumps(summary))
    directory.metrics.write_text('{"step": 1}\n')
    (directory.logs / "actor.log").write_text(f"{WILD} of a log\n")
    assert main(["status", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert f"1 in place: {TAMED}" in out
    assert (f"error: {TAMED}" if status == "failed" else f"{TAMED} of a log") in out
    assert not {"\x1b", "\x07"} & set(out)
