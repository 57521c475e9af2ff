"""The acceptance kit on GPUs: `bash tests/run.sh -m gpu`. It ends with a table, gpu_report.md and gpu_report.json.

With `--rehearse` the same checks run on CPUs, as tests/kit/test_rehearsal.py has them.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import kit_report
import pytest
from kit import BUDGET_S, CHECKS, FAILED, SKIPPED, SLOWER, Check, Outcome, Place, perform
from kit_machine import machine

from slurm_rlhf.cluster.gpu_query import local_gpus
from slurm_rlhf.cluster.slurm_environment import read_slurm

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(SLOWER * BUDGET_S)]
ROOT = Path(__file__).parents[2]


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
    """Run on this machine; a rehearsal pretends to have two GPUs. Skips the test where there is no GPU."""
    environ, rehearse = dict(os.environ), request.config.getoption("--rehearse")
    gpus = ("0", "1") if rehearse else local_gpus(environ)
    if not gpus:
        pytest.skip("needs a GPU: neither nvidia-smi nor the driver's directory shows one")
    slurm = read_slurm(environ)
    place = Place(gpus, rehearse, slurm.job_nodes if slurm else ())
    reports = Path(request.config.getoption("--gpu_report") or ROOT).absolute()
    reports.mkdir(parents=True, exist_ok=True)
    shared = str(reports) if place.nodes else None  # the checkout is where all nodes see it
    with tempfile.TemporaryDirectory(prefix="gpu-check-", dir=shared, ignore_cleanup_errors=True) as scratch:
        made = Kit(replace(place, scratch=scratch), reports)
        request.config.pluginmanager.register(made)
        yield made


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name.replace(" ", "-"))
def test_check(kit: Any, check: Check) -> None:
    outcome = kit.run(check)
    if outcome.verdict == SKIPPED:
        pytest.skip(outcome.figure)
    assert outcome.verdict != FAILED, f"{outcome.figure}\n{outcome.log}"
