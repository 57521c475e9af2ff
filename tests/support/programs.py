"""Programs of a test's own, which stand before the machine's."""

from __future__ import annotations

from pathlib import Path

import pytest


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
