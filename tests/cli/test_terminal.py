"""What commands print of models, data and logs moves no cursor, sets no title and fills no clipboard."""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slurm_rlhf.cli import check_parity, generate, mpi_start
from slurm_rlhf.cli.main import guarded, main
from slurm_rlhf.cli.preflight import show as show_examination
from slurm_rlhf.cli.preflight import tell
from slurm_rlhf.cli.status import show
from slurm_rlhf.cluster.processes import Session
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import RunError
from slurm_rlhf.generate.job import GenerateJob
from slurm_rlhf.nodes.report import WARNING, Check, Finding, Report
from slurm_rlhf.parity import processes
from slurm_rlhf.parity.processes import Options
from slurm_rlhf.parity.verdicts import Line
from slurm_rlhf.run.reporting import Reporting
from slurm_rlhf.run_directory import RunDirectory
from slurm_rlhf.trainer.sft import SftRecord

WILD, TAMED = "a\x1b]0;title\x07\x1b[2J", r"a\x1b]0;title\x07\x1b[2J"
EXAMINED = Report(("n1",), (Check("disk", "fine", (Finding(WARNING, ("n1",), WILD, "mend it"),)),), 0.1)


def failing(error: BaseException) -> Callable[[], int]:
    def work() -> int:
        raise error

    return work


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
        lambda root: SftRecord.say(
            SimpleNamespace(_world=SimpleNamespace(rank=0), _paths=SimpleNamespace(root=root / "none")),  # type: ignore[arg-type]
            WILD,
        ),
        lambda root: mpi_start._refuse(SimpleNamespace(broadcast=lambda message: None), RunError(WILD)),  # type: ignore[arg-type]
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
    monkeypatch.setattr(generate, "_look", lambda *_: EXAMINED)
    generate.engine_launcher(Config(), root, SimpleNamespace(used_nodes=["n1"]), ())  # type: ignore[arg-type]


def failed_comparison(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = Line(WILD, "fp32", "failed", WILD, log=(WILD,))
    monkeypatch.setattr(processes, "compare", lambda subjects, options: iter([line]))
    check_parity._compared([], Options(), as_json=False)


@pytest.mark.parametrize(("printed", "times"), [(warned, 1), (failed_comparison, 3)])
def test_text_of_others_is_escaped_wherever_a_command_prints_it(
    printed: Callable[[Path, pytest.MonkeyPatch], None],
    times: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)  # of the process that runs the tests
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
