"""The acceptance kit for GPUs on CPUs: the same checks and the same report, with stand-ins for the GPU's parts.

`bash tests/run.sh -m gpu --rehearse` does it by hand.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from kit import CHECKS
from kit_report import REHEARSED
from programs import completed
from waiting import scaled

pytestmark = [pytest.mark.engine, pytest.mark.slow]

ALONE = {"ppo tp 1", "nodes", "nodes sync", "nodes ppo"}
"""Left out on one machine of two GPUs."""


def rehearse(reports: Path, *words: str) -> tuple[str, dict[str, Any]]:
    """(what pytest printed, gpu_report.json) of a session of its own."""
    program = Path(__file__).with_name("test_gpu.py")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(program), "-m", "gpu", "--rehearse"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    done = completed([*command, f"--gpu_report={reports}", *words], timeout_s=scaled(1900), env=environment)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    report: dict[str, Any] = json.loads((reports / "gpu_report.json").read_text())
    return done.stdout, report


def test_a_slice_of_the_kit(tmp_path: Path) -> None:
    output, report = rehearse(tmp_path, "-k", "repair or bench-train or nodes-ppo")
    verdicts = {check["name"]: check["verdict"] for check in report["checks"]}
    assert verdicts == {"sync repair": "passed", "bench train": "passed", "nodes ppo": "skipped"}
    assert report["rehearsal"] is True
    assert REHEARSED in output
    assert REHEARSED in (tmp_path / "gpu_report.md").read_text()
    assert "PASSED: 2 passed, 0 failed, 1 skipped" in output
    table = [line for line in output.splitlines() if line.startswith("sync repair  passed")]
    assert "repeated over gloo" in table[0]
    figures = {check["name"]: check["figures"] for check in report["checks"]}
    assert figures["bench train"]["ragged"]["tflops"] > 0
    assert figures["bench train"]["ragged"]["mfu"] is None  # a CPU has no peak in the table


@pytest.mark.full
@pytest.mark.timeout(2000)
def test_the_whole_kit(tmp_path: Path) -> None:
    output, report = rehearse(tmp_path)
    verdicts = {check["name"]: check["verdict"] for check in report["checks"]}
    expected = {check.name: "skipped" if check.name in ALONE else "passed" for check in CHECKS}
    assert verdicts == expected, output[-6000:]
    assert all(check["figure"] for check in report["checks"])
