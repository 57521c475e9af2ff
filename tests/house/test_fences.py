"""What the fences use of other libraries is there, with the signature used. Runs first: see tests/conftest.py."""

from __future__ import annotations

from pathlib import Path

import fences
import pytest


@pytest.mark.parametrize("fence", fences.fences(), ids=lambda path: f"{path.parent.name}/{path.name}")
def test_the_installed_library_has_what_the_fence_uses(fence: Path) -> None:
    assert fences.changes(fence) == []


def test_private_names_of_others_are_used_in_fences_only() -> None:
    """Nor a submodule of vLLM, DeepSpeed or transformers: only the packages themselves are public."""
    outside = sorted(set(fences.ROOT.rglob("*.py")) - set(fences.fences()))
    assert [
        f"slurm_rlhf/{module.relative_to(fences.ROOT)}:{line}: {text} belongs into _<library>.py of its room"
        for module in outside
        for line, text in fences.private_uses(module.read_text(encoding="utf-8"))
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
    monkeypatch.setattr(fences, "ROOT", tmp_path)
    monkeypatch.setattr(fences, "_directory", lambda name: tmp_path / name)
    monkeypatch.setattr(fences, "_installed", lambda name: "2")
    fence = room / "_torch.py"
    fence.write_text(f'"""Things, written for torch 1.0.\n\nx.py {entry}\n"""\nimport torch\ntorch.{use}\n')
    found = fences.changes(fence)
    assert len(found) == bool(problem)
    assert problem in "".join(found)


def test_a_file_that_is_gone_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fences, "ROOT", tmp_path)
    fence = tmp_path / "_torch.py"
    fence.write_text('"""Things, written for torch 1.0.\n\ngone.py f(x)\n"""\nimport torch\ntorch.f(1)\n')
    assert "torch/gone.py is gone, and f with it" in fences.changes(fence)[0]


def test_a_fence_without_a_list_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fences, "ROOT", tmp_path)
    (tmp_path / "_torch.py").write_text('"""Things."""\n')
    assert "its docstring must say" in fences.changes(tmp_path / "_torch.py")[0]


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
    assert [text for _, text in fences.private_uses(source)] == uses
