"""Names of other libraries that fences use are there, with the signature used. Runs first: see tests/conftest.py.

A fence is a module of a room whose name begins with `_<library>`. Only fences may use private names and submodules of
LIBRARIES. The docstring of a fence names the version that it was written for and lists what it uses, one name a line:

  v1/engine/core_client.py InprocClient.add_request(self, request)     a method, with the arguments that are passed
  v1/engine/core.py EngineCore.batch_queue                             an attribute that the class defines
  runtime/zero/partition_parameters.py param.ds_numel                  an attribute that this file sets on objects
  model_executor/model_loader/reload/layerwise.py initialize_layerwise_reload(model)

The check reads the installed sources (and torch's stubs) and imports nothing, so it takes a second.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import slurm_rlhf

ROOT = Path(slurm_rlhf.__file__).parent
LIBRARIES = ("vllm", "deepspeed", "transformers", "torch")
DOCUMENTED_SUBMODULES = ("torch",)
"""Libraries whose submodules are public. Of the others, only the package itself is."""

BINDING = re.compile(r"^\S+\.so ([\w.]+)", re.MULTILINE)
"""Names of compiled modules have no source; a test of their room imports the library for them."""
ENTRY = re.compile(r"^(\S+\.pyi?) ([\w.]+)(?:\((.*)\))?$")
VERSION = re.compile(r"\bwritten for (\w+) (\d+(?:\.\d+)*)")

NAMED_TUPLE = {"_asdict", "_field_defaults", "_fields", "_make", "_replace"}
"""Public names of Python's named tuples, which begin so that no field can have the same name."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def fences() -> list[Path]:
    """All fences of the package."""
    return sorted(path for library in LIBRARIES for path in ROOT.rglob(f"_{library}*.py"))


def private_uses(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of every use of a private name, or of a submodule of LIBRARIES, that belongs in a fence."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if _is_private_module(alias.name):
                    yield node.lineno, f"import {alias.name}"
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [alias.name for alias in node.names if _is_private_import(node.module, alias.name)]
            if names:
                yield node.lineno, f"from {node.module} import {', '.join(names)}"
        elif isinstance(node, ast.Attribute) and _is_private(node.attr) and not _is_own(node.value):
            yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr", "setattr"):
            name = node.args[1] if len(node.args) > 1 else None
            if isinstance(name, ast.Constant) and _is_private(str(name.value)) and not _is_own(node.args[0]):
                yield node.lineno, ast.unparse(node)


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in NAMED_TUPLE


def _is_own(value: ast.expr) -> bool:
    """Whether `value` is the object or the class whose method this is; or Python's own module `os`."""
    if isinstance(value, ast.Call):
        return isinstance(value.func, ast.Name) and value.func.id == "super"
    return isinstance(value, ast.Name) and value.id in ("self", "cls", "os")


def _is_private_module(name: str) -> bool:
    top, *inner = name.split(".")
    return top in LIBRARIES and bool(inner) and (top not in DOCUMENTED_SUBMODULES or any(map(_is_private, inner)))


def _is_private_import(module: str, name: str) -> bool:
    return module.partition(".")[0] in LIBRARIES and (_is_private_module(module) or _is_private(name))


def changes(fence: Path) -> list[str]:
    """List what the installed library lacks or has otherwise, and where the fence and its list do not agree."""
    source = fence.read_text(encoding="utf-8")
    library = fence.stem.split("_")[1]
    docstring = ast.get_docstring(ast.parse(source), clean=False) or ""
    where = f"slurm_rlhf/{fence.relative_to(ROOT).as_posix()}"
    version = VERSION.search(docstring)
    entries = [match.groups() for line in docstring.splitlines() if (match := ENTRY.match(line))]
    if version is None or version.group(1) != library or not entries:
        return [f"{where}: its docstring must say `written for {library} VERSION` and list what it uses"]
    code = source.replace(docstring, "\n" * docstring.count("\n"), 1)
    return [
        *_not_listed(where, code, library, [name for _, name, _ in entries], BINDING.findall(docstring)),
        *(
            f"{library} {_installed(library)} (this code was written for {version.group(2)}): {problem}; used in "
            f"{where}{_line(code, name)}"
            for file, name, arguments in entries
            if (problem := _problem(library, file, name, arguments))
        ),
    ]


def _not_listed(where: str, code: str, library: str, names: list[str], bindings: list[str]) -> Iterator[str]:
    listed = {part for name in (*names, *bindings) for part in name.split(".")}
    for name in sorted({name.rpartition(".")[2] for name in names} - {"__init__"}):
        if not _line(code, name):
            yield f"{where}: it lists {name} and does not use it"
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Attribute) and _is_private(node.attr) and not _is_own(node.value):
            used = [node.attr]
        elif isinstance(node, ast.ImportFrom) and _is_private_module(node.module or ""):
            used = [] if node.module in _modules(library) else [str(node.module)]
            used += [alias.name for alias in node.names if f"{node.module}.{alias.name}" not in _modules(library)]
        elif isinstance(node, ast.Import):
            used = [a.name for a in node.names if _is_private_module(a.name) and a.name not in _modules(library)]
        else:
            continue
        for name in used:
            if name not in listed:
                yield f"{where}:{node.lineno}: it uses {name} and does not list it"


def _line(code: str, name: str) -> str:
    """ ":12", the first line of `code` that has the last word of `name`; empty where none has."""
    word = re.compile(rf"\b{re.escape(name.rpartition('.')[2])}\b")
    return next((f":{number}" for number, line in enumerate(code.splitlines(), 1) if word.search(line)), "")


@cache
def _installed(library: str) -> str:
    return importlib.metadata.version(importlib.metadata.packages_distributions()[library][0])


@cache
def _directory(library: str) -> Path:
    spec = importlib.util.find_spec(library)
    assert spec is not None, f"{library} is not installed"
    return Path(spec.submodule_search_locations[0])


class _Modules:
    """The dotted names of a library's modules, asked for one by one."""

    def __init__(self, directory: Path) -> None:
        self._parent = directory.parent

    def __contains__(self, name: object) -> bool:
        path = self._parent.joinpath(*str(name).split("."))
        return path.is_dir() or any(path.parent.glob(f"{path.name}.*"))


def _modules(library: str) -> _Modules:
    return _Modules(_directory(library))


@cache
def _parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def _problem(library: str, file: str, name: str, arguments: str | None) -> str:
    """Return the fault of one entry; empty if it has none."""
    path = _directory(library) / file
    if not path.is_file():
        return f"{library}/{file} is gone, and {name} with it"
    found = _find(_parsed(path), name)
    if not found:
        return f"{name} is gone from {library}/{file}"
    functions = [node for node in found if isinstance(node, Function)]
    if arguments is None or any(_takes(function, arguments) for function in functions):
        return ""
    if not functions:
        return f"{name} in {library}/{file} is a function no more"
    return f"{name}({arguments}) is now {name}({ast.unparse(functions[0].args)}) in {library}/{file}"


def _find(module: ast.Module, name: str) -> list[ast.AST]:
    """Where `name` is defined: "f", "Class.method", "Class.attribute", or "variable.attribute" that is set anywhere."""
    owner, _, last = name.rpartition(".")
    if not owner:
        return [node for node in _statements(module.body) if last in _names(node)]
    classes = [node for node in _classes(module) if node.name == owner]
    if not classes:
        return [node for node, targets in _assignments(module) if f"{owner}.{last}" in targets]
    found: list[ast.AST] = []
    for each in classes:
        found += [node for node in _statements(each.body) if last in _names(node)]
        found += [node for node, targets in _assignments(each) if f"self.{last}" in targets]
    return found


@cache
def _classes(module: ast.Module) -> list[ast.ClassDef]:
    return [node for node in ast.walk(module) if isinstance(node, ast.ClassDef)]


@cache
def _assignments(scope: ast.AST) -> list[tuple[ast.AST, list[str]]]:
    """The assignments in a module or a class, each with what it assigns to."""
    return [(node, targets) for node in ast.walk(scope) if (targets := _targets(node))]


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of `body`, and those under its `if`, `try` and `with`."""
    for node in body:
        yield node
        for field in ("body", "orelse", "finalbody"):
            if isinstance(node, (ast.If, ast.Try, ast.With)):
                yield from _statements(getattr(node, field, []))


def _names(node: ast.stmt) -> list[str]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [node.name]
    if isinstance(node, ast.ImportFrom):
        return [alias.asname or alias.name for alias in node.names]
    return _targets(node)


def _targets(node: ast.AST) -> list[str]:
    """List the targets of an assignment."""
    if isinstance(node, ast.Assign):
        return [ast.unparse(part) for target in node.targets for part in getattr(target, "elts", [target])]
    return [ast.unparse(node.target)] if isinstance(node, ast.AnnAssign) else []


def _takes(function: Function, arguments: str) -> bool:
    """Whether `function` can be called with the arguments "a, b, *, by_name"."""
    positional, _, by_name = (part.strip(" ,") for part in arguments.partition("*"))
    given = [name.strip() for name in positional.split(",") if name.strip()]
    named = [name.strip() for name in by_name.split(",") if name.strip()]
    args = function.args
    ordered = [arg.arg for arg in (*args.posonlyargs, *args.args)]
    required = ordered[: len(ordered) - len(args.defaults)]
    required += [arg.arg for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True) if default is None]
    known = {*ordered, *(arg.arg for arg in args.kwonlyargs)}
    in_order = given == ordered[: len(given)] or (args.vararg is not None and ordered == given[: len(ordered)])
    return in_order and (args.kwarg is not None or set(named) <= known) and set(required) <= {*given, *named}


# --- the tests --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fence", fences(), ids=lambda path: f"{path.parent.name}/{path.name}")
def test_the_installed_library_has_what_the_fence_uses(fence: Path) -> None:
    assert changes(fence) == []


def test_private_names_of_others_are_used_in_fences_only() -> None:
    """Submodules of vLLM, DeepSpeed and transformers are private, too: only the packages themselves are public."""
    outside = sorted(set(ROOT.rglob("*.py")) - set(fences()))
    assert [
        f"slurm_rlhf/{module.relative_to(ROOT)}:{line}: {text} belongs into _<library>.py of its room"
        for module in outside
        for line, text in private_uses(module.read_text(encoding="utf-8"))
    ] == []


LIBRARY = """
class Scheduler:
    usage: float = 0.0
    def __init__(self): self.queue = []
    def finish(self, a, b=1, *, c=None): ...
def start(model, device): ...
def link(param): param.ds_id = 1
"""


@pytest.mark.parametrize(
    ("entry", "use", "problem"),
    [
        ("Scheduler.finish(self, a, *, c)", "finish", ""),
        ("Scheduler.queue", "queue", ""),
        ("Scheduler.usage", "usage", ""),
        ("param.ds_id", "ds_id", ""),
        ("start(model, device)", "start", ""),
        ("Scheduler.finish(self, b)", "finish", "Scheduler.finish(self, b) is now Scheduler.finish(self, a, b=1, *, c"),
        (
            "start(model)",
            "start",
            "start(model) is now start(model, device) in torch/x.py; used in slurm_rlhf/r/_torch",
        ),
        (
            "Scheduler.halt(self)",
            "halt",
            "torch 2 (this code was written for 1.0): Scheduler.halt is gone from torch/x",
        ),
        ("param.ds_numel", "ds_numel", "param.ds_numel is gone"),
        ("Scheduler.queue", "x", "it lists queue and does not use it"),
        ("Scheduler.queue", "queue._hidden", "it uses _hidden and does not list it"),
    ],
)
def test_a_change_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entry: str, use: str, problem: str) -> None:
    library, room = tmp_path / "torch", tmp_path / "r"
    library.mkdir()
    room.mkdir()
    (library / "x.py").write_text(LIBRARY)
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    monkeypatch.setitem(globals(), "_directory", lambda name: tmp_path / name)
    monkeypatch.setitem(globals(), "_installed", lambda name: "2")
    fence = room / "_torch.py"
    fence.write_text(f'"""Things, written for torch 1.0.\n\nx.py {entry}\n"""\nimport torch\ntorch.{use}\n')
    found = changes(fence)
    assert len(found) == bool(problem)
    assert problem in "".join(found)


def test_a_file_that_is_gone_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    fence = tmp_path / "_torch.py"
    fence.write_text('"""Things, written for torch 1.0.\n\ngone.py f(x)\n"""\nimport torch\ntorch.f(1)\n')
    assert "torch/gone.py is gone, and f with it" in changes(fence)[0]


def test_a_fence_without_a_list_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    (tmp_path / "_torch.py").write_text('"""Things."""\n')
    assert "its docstring must say" in changes(tmp_path / "_torch.py")[0]


@pytest.mark.parametrize(
    ("source", "uses"),
    [
        ("import vllm.v1.engine", ["import vllm.v1.engine"]),
        ("from vllm.config import a", ["from vllm.config import a"]),
        ("from torch import _C, nn", ["from torch import _C"]),
        ("from torch._inductor import config", ["from torch._inductor import config"]),
        ("from torch.nn import functional\nimport torch.distributed\nfrom vllm import LLM", []),
        ("model._init_weights(x)", ["model._init_weights"]),
        ("class A:\n    def f(self): return self._x + self._y._z", ["self._y._z"]),
        ("hasattr(p, '_hp_mapping')", ["hasattr(p, '_hp_mapping')"]),
        ("super()._x()\nx.__name__\nos._exit(1)", []),
    ],
)
def test_private_uses_are_found(source: str, uses: list[str]) -> None:
    assert [text for _, text in private_uses(source)] == uses
