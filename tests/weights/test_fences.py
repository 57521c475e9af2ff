"""Torch's C++ bindings that process groups use are there, with the signature used. Runs first."""

from __future__ import annotations

import importlib
import re
from typing import Any

import pytest
import torch

from slurm_rlhf.process_groups import _torch as fence

ENTRY = re.compile(r"^(\S+)\.so ([\w.]+)(?:\((.*)\))?$", re.MULTILINE)
ENTRIES = ENTRY.findall(fence.__doc__ or "")
VERSION = re.search(r"written for torch (\S+)\.", fence.__doc__ or "")


def problem(module: str, name: str, arguments: str | None) -> str:
    """Return the fault of one entry; empty if it has none. Bindings have no source: pybind11 documents them."""
    found: Any = importlib.import_module(f"torch.{module.replace('/', '.')}")
    for part in name.split("."):
        if not hasattr(found, part):
            return f"{name} is gone from torch/{module}"
        found = getattr(found, part)
    if not arguments:
        return ""
    wanted = [word.strip() for word in arguments.replace("*", "").split(",") if word.strip()]
    known = re.findall(rf"\b{name.rpartition('.')[2]}\((.*?)\) -> ", found.__doc__ or "")
    for text in known:
        taken = [item.partition(":")[0].strip() for item in text.split(", ") if not item.startswith("self:")]
        if all(word in taken for word in wanted) and ("*" in arguments or taken[: len(wanted)] == wanted):
            return ""
    return f"{name}({arguments}) is now {name}({' or '.join(known)}) in torch/{module}"


@pytest.mark.parametrize(("module", "name", "arguments"), ENTRIES, ids=[name for _, name, _ in ENTRIES])
def test_the_bindings_of_the_installed_torch(module: str, name: str, arguments: str) -> None:
    assert VERSION is not None
    wrong = problem(module, name, arguments)
    assert not wrong, (
        f"torch {torch.__version__} (this code was written for {VERSION[1]}): {wrong}; used in process_groups/_torch.py"
    )


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("ProcessGroupGloo._Options._addresses", "", "_Options._addresses is gone from torch/_C/_distributed_c10d"),
        ("Backend._allgather_base", "input, output", r"_allgather_base\(input, output\) is now .*output: torch.Tensor"),
        ("ProcessGroupGloo.create_device", "*, address", r"create_device\(\*, address\) is now .*hostname: str"),
    ],
)
def test_a_change_is_named(name: str, arguments: str, said: str) -> None:
    assert re.search(said, problem("_C/_distributed_c10d", name, arguments))


def test_every_use_is_listed() -> None:
    assert len(ENTRIES) == 8
    with open(fence.__file__, encoding="utf-8") as opened:
        code = opened.read().replace(fence.__doc__ or "", "")
    listed = set(re.findall(r"\w+", fence.__doc__ or ""))
    assert set(re.findall(r"(?<!self)\.(_[a-z]\w*|_[A-Z]\w*)", code)) - {"_torch", "_utils"} <= listed
