"""Checks that misbehave, for the test of what runs them. Little is imported, so that they begin at once."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

from kit import Finding, Place


def sleeper(place: Place) -> Finding:
    """A check that hangs, with a child that hangs and left its session."""
    child = subprocess.Popen(["sleep", "300"], start_new_session=True)
    Path(place.scratch, "pids").write_text(f"{os.getpid()} {child.pid}")
    time.sleep(300)
    raise AssertionError


def dying(place: Place) -> Finding:
    os._exit(7)


def failing(place: Place) -> Finding:
    print("what led to it")
    raise ValueError("the\nreason")


def seeing(place: Place) -> Finding:
    """Show what a check may know of the allocation and of the GPUs."""
    names = ("SLURM_JOB_ID", "SLURM_RLHF_TEST_GPUS")
    return Finding("fine", {name: os.environ.get(name) for name in names})
