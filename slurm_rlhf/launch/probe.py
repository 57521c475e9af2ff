"""`python -m slurm_rlhf.launch.probe CANARY`: what one node has to say before a run starts, as a line of JSON.

CANARY is a file that the conductor has just written into the run directory. Imports no torch: it takes a second.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from slurm_rlhf.cluster.current import node_name

PACKAGES = ("slurm_rlhf", "torch", "vllm", "deepspeed", "transformers", "numpy", "pyzmq", "msgpack")
"""Those that have to be alike: they compute the same numbers, or speak to each other."""

MISSING = "missing"
_CANARY_S = 5.0  # for a file system that takes its time to show a new file


def main() -> None:
    print(json.dumps(answer(Path(sys.argv[1]))), flush=True)


def answer(canary: Path, wait_s: float = _CANARY_S) -> dict[str, Any]:
    """`node`, `canary` (what the file holds; empty: it is not there), `writable`, `versions`."""
    return {
        "node": node_name(),
        "canary": _read(canary, wait_s),
        "writable": os.access(canary.parent, os.W_OK | os.X_OK),
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """Package -> version, as this Python would import it."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = MISSING
    return found


def _read(file: Path, wait_s: float) -> str:
    end = time.monotonic() + wait_s
    while True:
        try:
            return file.read_text(encoding="utf-8")
        except OSError:
            if time.monotonic() > end:
                return ""
            time.sleep(0.2)


if __name__ == "__main__":
    main()
