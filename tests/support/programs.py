"""Programs of a test's own, which stand before the machine's."""

from __future__ import annotations

import contextlib
import os
import pty
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from waiting import HANG_S


def write_program(file: Path, text: str) -> Path:
    """Write an executable file, and the directory that it stands in."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    file.chmod(0o755)
    return file


def first_on_path(patch: pytest.MonkeyPatch, directory: Path, **scripts: str) -> None:
    """Put programs of these names first on PATH; each is a script of the shell."""
    for name, script in scripts.items():
        write_program(directory / name, f"#!/bin/sh\n{script}\n")
    patch.setenv("PATH", f"{directory}:/usr/bin:/bin")


def completed(
    words: Sequence[str | Path], timeout_s: float = HANG_S, check: bool = False, **more: Any
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, and keep what it writes."""
    return subprocess.run(words, capture_output=True, text=True, timeout=timeout_s, check=check, **more)


def on_terminal(words: Sequence[str | Path], **variables: str) -> str:
    """Run a program on a terminal to its end, and keep what it shows."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(words, stdin=theirs, stdout=theirs, stderr=theirs, env=os.environ | variables)
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # the other end is closed
        while part := os.read(ours, 65536):
            shown += part
    os.close(ours)
    assert process.wait(HANG_S) == 0, shown.decode()
    return shown.decode()
