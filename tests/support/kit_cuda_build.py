"""`python kit_cuda_build.py`, with the Python of a CUDA build: how its bindings differ from what the stand-ins hold to.

On a CPU build the stand-ins read `Backend`'s bindings and the stubs; a CUDA build has the classes themselves.
"""

from __future__ import annotations

import inspect
import json
from typing import Any

import torch
from gpu_cuda import Cuda
from gpu_nccl_bindings import BACKEND, OPTIONS, STUB, WORK, known
from gpu_signatures import signatures
from torch._C import _distributed_c10d as bindings


def differences(real: Any) -> list[str]:
    """Of methods whose parameters have other names or another order, and of names that `real`, NCCL's group, lacks."""
    found = []
    members = {name: getattr(BACKEND, name) for name in dir(BACKEND)}
    names = {name for name, member in members.items() if callable(member) and not inspect.isclass(member)}
    for name in sorted(names | STUB.methods.keys()):
        if name.startswith("_pybind11") or (name.startswith("__") and name.endswith("__")):
            continue
        held = {_names(each) for each in known(name)}
        if not hasattr(real, name):
            found.append(f"ProcessGroupNCCL has no {name}")
        elif (there := {_names(each) for each in signatures(getattr(real, name))}) != held:
            found.append(f"{name}: the binding takes {sorted(there)}, the stand-in {sorted(held)}")
    options = real.Options()
    found += [f"Options has no {field}" for field in sorted(OPTIONS.fields) if not hasattr(options, field)]
    found += [f"Work has no {name}" for name in WORK.methods if not hasattr(bindings.Work, name)]
    found += [f"torch.cuda has no {name}" for name in dir(Cuda) if name[0] != "_" and not hasattr(torch.cuda, name)]
    return found


def _names(signature: inspect.Signature) -> tuple[str, ...]:
    return tuple(name for name in signature.parameters if name != "self")


if __name__ == "__main__":
    print(json.dumps({"cuda": torch.version.cuda, "differences": differences(bindings.ProcessGroupNCCL)}))
