"""The acceptance kit on GPUs: `bash tests/run.sh -m gpu`. It ends with a table, gpu_report.md and gpu_report.json.

With `--rehearse` the same checks run on CPUs, as tests/kit/test_rehearsal.py has them.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import kit_report
import pytest
from kit import BUDGET_S, CHECKS, FAILED, SKIPPED, SLOWER, Check, Outcome, Place, perform
from waiting import HANG_S

from slurm_rlhf.cluster.gpu_query import ask_gpus, local_gpus
from slurm_rlhf.cluster.slurm_environment import read_slurm
from slurm_rlhf.nodes.node_look import versions

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(SLOWER * BUDGET_S)]
ROOT = Path(__file__).parents[2]


# --- the machine ------------------------------------------------------------------------------------------------------


SCRIPT = """
import json, torch
import torch.distributed as dist
found = {"cuda of torch": torch.version.cuda or "none: a CPU build"}
if dist.is_nccl_available():
    found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
print(json.dumps(found))
"""
"""In a process of its own: this one touches no GPU."""


def machine() -> dict[str, Any]:
    """{"gpus": [...], "driver", "versions": {...}, "interfaces": [...], "topology", ...}. A few seconds."""
    look = ask_gpus(dict(os.environ))
    return {
        "gpus": [asdict(gpu) for gpu in look.gpus],
        "driver": look.driver,
        "cuda_of_driver": look.cuda,
        "said": look.said,  # what went wrong, where there are none
        "versions": {**versions(), **_torch()},
        "interfaces": interfaces(),
        "topology": _words("nvidia-smi", "topo", "-m"),
        "kernel": platform.release(),
        "cpus": len(os.sched_getaffinity(0)),
        "commit": _words("git", "-C", str(ROOT), "describe", "--always", "--dirty"),
    }


def interfaces() -> list[str]:
    """`ib0: up, 200 Gbit/s`; InfiniBand's devices as `mlx5_0 port 1: 200 Gb/sec (4X HDR)`. Without addresses."""
    found = []
    net, infiniband = Path("/sys/class/net"), Path("/sys/class/infiniband")
    for place in sorted(net.iterdir()) if net.is_dir() else ():
        if place.name != "lo":
            speed = _read(place / "speed")
            rate = f", {int(speed) / 1000:g} Gbit/s" if speed.isdigit() else ""
            found.append(f"{place.name}: {_read(place / 'operstate') or 'unknown'}{rate}")
    for rate_file in sorted(infiniband.glob("*/ports/*/rate")):
        found.append(f"{rate_file.parts[-4]} port {rate_file.parts[-2]}: {_read(rate_file)}")
    return found


def _torch() -> dict[str, str]:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=HANG_S, check=False)
    try:
        return dict(json.loads(done.stdout))
    except ValueError:
        return {"cuda of torch": " ".join(done.stderr.split())[-200:]}


def _words(*command: str) -> str:
    """What a command prints; nothing where it is missing or fails."""
    if shutil.which(command[0]) is None:
        return ""
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=HANG_S, check=False, stdin=subprocess.DEVNULL
    )
    plain = re.sub(r"\x1b\[[\d;]*m", "", done.stdout)  # nvidia-smi underlines its heading
    return plain.strip() if done.returncode == 0 else ""


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


# --- the tests --------------------------------------------------------------------------------------------------------


class Kit:
    """A session of the kit; a plugin of pytest, for the table at the end."""

    def __init__(self, place: Place, reports: Path) -> None:
        self.place = place
        self.reports = reports
        self.machine = machine()
        self.outcomes: list[Outcome] = []
        self.end = time.monotonic() + BUDGET_S * (SLOWER if place.rehearse else 1.0)
        self.began = time.monotonic()

    def run(self, check: Check) -> Outcome:
        """The report is written after every check: what ends the session early leaves what was found."""
        scratch = Path(self.place.scratch, check.name.replace(" ", "-"))
        place = replace(self.place, scratch=str(scratch))
        outcome = perform(check, place, self.end - time.monotonic())
        self.outcomes.append(outcome)
        seconds = time.monotonic() - self.began
        report = kit_report.as_json(self.outcomes, self.machine, self.place.rehearse, seconds)
        self.files = kit_report.write(self.reports, report)
        return outcome

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("GPU report")
        if self.place.rehearse:
            terminalreporter.write_line(kit_report.REHEARSED)
        terminalreporter.write_line(kit_report.table(self.outcomes))
        terminalreporter.write_line(f"{kit_report.verdict(self.outcomes)}. Written to {self.files[0]} and .json")


@pytest.fixture(scope="session")
def kit(request: pytest.FixtureRequest) -> Iterator[Kit]:
    place = place_of(request.config.getoption("--rehearse"), dict(os.environ))
    reports = Path(request.config.getoption("--gpu_report") or ROOT).absolute()
    reports.mkdir(parents=True, exist_ok=True)
    shared = str(reports) if place.nodes else None  # the checkout is where all nodes see it
    with tempfile.TemporaryDirectory(prefix="gpu-check-", dir=shared, ignore_cleanup_errors=True) as scratch:
        made = Kit(replace(place, scratch=scratch), reports)
        request.config.pluginmanager.register(made)
        yield made


def place_of(rehearse: bool, environ: dict[str, str]) -> Place:
    """What is here; a rehearsal pretends to have two GPUs. Skips the test where there is nothing."""
    slurm = read_slurm(environ)
    nodes = slurm.job_nodes if slurm else ()
    if rehearse:
        return Place(("0", "1"), rehearse=True, nodes=nodes)
    gpus = local_gpus(environ)
    if not gpus:
        pytest.skip("needs a GPU: neither nvidia-smi nor the driver's directory shows one")
    return Place(gpus, nodes=nodes)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name.replace(" ", "-"))
def test_check(kit: Any, check: Check) -> None:
    outcome = kit.run(check)
    if outcome.verdict == SKIPPED:
        pytest.skip(outcome.figure)
    assert outcome.verdict != FAILED, f"{outcome.figure}\n{outcome.log}"
