"""Engines of a whole run that behave otherwise: their module is changed where Python starts, in those ranks alone."""

from __future__ import annotations

from pathlib import Path

_HOOK = """
import importlib.abc, importlib.machinery, os, sys

NAME = "slurm_rlhf.rollout.vllm_engine"

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != NAME:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        run = spec.loader.exec_module
        def exec_module(module):
            run(module)
            change(module)
        spec.loader.exec_module = exec_module
        return spec

if "--role=rollout" in sys.orig_argv and os.environ.get("LOCAL_RANK") in RANKS:
    sys.meta_path.insert(0, Finder())
"""


def write_patch(directory: Path, change: str, ranks: tuple[str, ...] = ("0", "1")) -> str:
    """Write `change`, source that defines `change(module)` for rollout/vllm_engine.py, for the local `ranks` given.

    What PYTHONPATH has to be for the run.
    """
    directory.mkdir()
    (directory / "sitecustomize.py").write_text(f"{change}\nRANKS = {ranks!r}\n{_HOOK}")
    return str(directory)
