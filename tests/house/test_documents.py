"""The paths that README's map and CONTRIBUTING name are there, and every room is on the map."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import slurm_rlhf

ROOT = Path(slurm_rlhf.__file__).parents[1]
MAP = (ROOT / "README.md").read_text(encoding="utf-8").split("## Map of the repository")[1]
CONTRIBUTING = (ROOT / ".github" / "CONTRIBUTING.md").read_text(encoding="utf-8")
PACKAGE = ROOT / "slurm_rlhf"


def paths(text: str) -> list[str]:
    """What stands in backticks and looks like a path, without a place for a name in it."""
    found = re.findall(r"`([^`\s]+)`", text)
    return [path for path in found if re.search(r"/|\.(py|toml|sh)$", path) and not re.search(r"[<>*()]|\.venv", path)]


def is_there(path: str) -> bool:
    return (ROOT / path).exists() or any(path_ for path_ in PACKAGE.rglob(f"{path.rstrip('/')}"))


@pytest.mark.parametrize("text", [MAP, CONTRIBUTING], ids=["map", "contributing"])
def test_named_paths_exist(text: str) -> None:
    assert len(paths(text)) > 10
    assert [path for path in paths(text) if not is_there(path)] == []


def test_every_room_is_on_the_map() -> None:
    rooms = [path.name for path in PACKAGE.iterdir() if path.is_dir() and not path.name.startswith("_")]
    assert [room for room in rooms if f"{room}/`" not in MAP] == []
