"""Each model has processes and a time of its own: what ends one is a line, and not the end of the others."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from waiting import until

from slurm_rlhf.errors import ModelError
from slurm_rlhf.parity import processes
from slurm_rlhf.parity.processes import Task, compare
from slurm_rlhf.parity.verdicts import Line


def sample(task: Task, precision: str) -> None:
    """Do to the process what the name of the subject says."""
    what = task.subject.model
    print(f"about to {what}", flush=True)
    if what == "refuse" and precision == "fp32":
        raise ModelError("no head")
    if what == "raise":
        raise ValueError("\nfirst line\nsecond line")
    if what == "crash":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "leave":
        os._exit(7)
    if what == "hang":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        Path(task.subject.directory, "child").write_text(str(child.pid))
        time.sleep(600)


def follow(task: Task, precision: str) -> None:
    apart = {name: [1e-7, 1e-8] for name in ("vllm-trainer", "vllm-hf", "trainer-hf")}
    task.compared(precision).write_text(json.dumps({"tokens": 3, "apart": apart}))


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of the libraries, whose processes are real."""
    monkeypatch.setattr(processes, "sample", sample)
    monkeypatch.setattr(processes, "follow", follow)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def lines(tmp_path: Path, *names: str, timeout_s: float = 60.0) -> list[Line]:
    subjects = [Line(name, directory=str(tmp_path)) for name in names]
    return list(compare(subjects, ("fp32", "bf16"), 320, timeout_s))


@pytest.mark.slow
def test_what_goes_wrong_in_one_model_is_a_line_of_its_own(tmp_path: Path) -> None:
    found = lines(tmp_path, "raise", "crash", "leave", "refuse", "work")
    assert [(line.model, line.precision, line.verdict) for line in found] == [
        *((name, precision, "failed") for name in ("raise", "crash", "leave") for precision in ("fp32", "bf16")),
        ("refuse", "fp32", "failed"),
        ("refuse", "bf16", "agree"),
        ("work", "fp32", "agree"),
        ("work", "bf16", "agree"),
    ]
    reasons = {line.model: line.reason for line in found if line.precision == "fp32"}
    assert reasons == {
        "raise": "ValueError: first line",
        "crash": "its process was killed by SIGKILL",
        "leave": "its process ended with status 7",
        "refuse": "no head",
        "work": "",
    }
    assert found[2].log == ("about to crash",)
    assert any("second line" in said for said in found[0].log)
    assert found[-1].tokens == 3


@pytest.mark.slow
def test_a_model_that_hangs_is_ended_with_all_that_it_has_started(tmp_path: Path) -> None:
    found = lines(tmp_path, "hang", "work", timeout_s=5.0)
    assert [line.verdict for line in found] == ["failed", "failed", "agree", "agree"]
    assert found[0].reason == "hang was not done after 5 s (--timeout)"
    child = int((tmp_path / "child").read_text())
    stat = Path(f"/proc/{child}/stat")
    until(lambda: not stat.exists() or "Z" in stat.read_text().split()[2], "its end")


def test_what_is_refused_starts_nothing(tmp_path: Path) -> None:
    subjects = [
        Line("a", verdict="refused", reason="known to differ"),
        Line("b", verdict="failed", reason="no network"),
    ]
    found = list(compare(subjects, ("fp32", "bf16"), 320, 60.0))
    assert [(line.verdict, line.reason) for line in found] == [("refused", "known to differ"), ("failed", "no network")]
