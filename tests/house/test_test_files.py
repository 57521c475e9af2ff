"""The order of tests/: folders as the rooms, helpers in support/ that have users, no test file that needs another."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

TESTS = Path(__file__).parents[1]
ROOMS = {path.parent.name for path in (TESTS.parent / "slurm_rlhf").glob("*/__init__.py")}
OTHERS = {"api", "gpu", "house", "kit", "lab", "runs", "support"}
"""Folders that are no room: the public face, GPU code on stand-ins, the kit for GPUs, campaigns and comparisons, whole
runs, helpers, ..."""
SUSPECT = re.compile(r"^\s*(?:from|import)\b.*(?:\btests\b|\bconftest\b|test_)", re.MULTILINE)
"""An import that may be one of a test file."""
TEXTS = {path: path.read_text(encoding="utf-8") for path in TESTS.rglob("*.py")}


def imported(source: str) -> set[str]:
    """Modules that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
    return found


def test_no_file_imports_from_a_test_file() -> None:
    breaches = {
        f"{path.relative_to(TESTS)} imports {module}"
        for path, text in TEXTS.items()
        if SUSPECT.search(text)
        for module in imported(text)
        if module.split(".")[-1].startswith("test_") or module.split(".")[0] in ("tests", "conftest")
    }
    assert not breaches, f"put what they share into tests/support: {sorted(breaches)}"


def test_folders_are_those_of_the_rooms() -> None:
    folders = {path.name for path in TESTS.iterdir() if path.is_dir() and any(path.glob("*.py"))}
    assert folders <= ROOMS | OTHERS
    assert not list(TESTS.glob("test_*.py"))


def test_every_helper_has_users() -> None:
    """A module of support/, and what it defines in public, is named somewhere else."""
    words = Counter(word for text in TEXTS.values() for word in re.findall(r"\w+", text))
    own = {path: set(re.findall(r"\w+", text)) for path, text in TEXTS.items()}
    helpers = list(TESTS.joinpath("support").glob("*.py"))
    unused = [
        path.name for path in helpers if not any(path.stem in named for other, named in own.items() if other != path)
    ]
    for path in helpers:
        for node in ast.parse(TEXTS[path]).body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and words[node.name] < 2:
                unused.append(f"{path.name}: {node.name}")
    assert not unused, f"helpers that no test uses: {sorted(unused)}"


def test_docstrings_say_what_holds_and_not_which_issue_asked() -> None:
    numbered = re.compile(r"\bissue \d", re.IGNORECASE)
    found = [
        f"{path.relative_to(TESTS)}: {match[0]}" for path, text in TEXTS.items() for match in numbered.finditer(text)
    ]
    assert not found
