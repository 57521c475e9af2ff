"""Ask the module system of a cluster, Lmod or Environment Modules, what there is to load for a run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess

_TIMEOUT_S = 20.0
WANTED = ("cuda", "python", "gcc", "nccl", "openmpi")
"""What a run may need, in the order in which it is loaded."""
_NAME = re.compile(r"[A-Za-z0-9][\w.+-]*(/[\w.+-]+)+")


def ask_modules() -> list[str]:
    """List the modules that there are, in the order of `module avail`; empty where there is no module system."""
    command = _command()
    if command is None:
        return []
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return parse_modules(f"{done.stdout}\n{done.stderr}")  # both write to stderr, Lmod by default


def _command() -> list[str] | None:
    """Return what prints the modules, tersely; `module` itself is a function of login shells."""
    if lmod := os.environ.get("LMOD_CMD"):
        return [lmod, "bash", "--terse", "avail"]
    if (home := os.environ.get("MODULESHOME")) and os.access(f"{home}/libexec/modulecmd.tcl", os.R_OK):
        return ["tclsh", f"{home}/libexec/modulecmd.tcl", "bash", "avail", "-t"]
    if there := shutil.which("modulecmd"):
        return [there, "bash", "avail", "-t"]
    return None


def parse_modules(text: str) -> list[str]:
    """Parse a terse `module avail`: a name with its version in each line, between headings with a colon at the end."""
    names = []
    for line in text.splitlines():
        word = line.strip().removesuffix("(default)").removesuffix("(D)").strip()
        if _NAME.fullmatch(word) and word not in names:
            names.append(word)
    return names


def proposed(modules: list[str]) -> list[str]:
    """Choose the newest version of each module of `WANTED`; its name may have a vendor before it."""
    found = []
    for wanted in WANTED:
        alike = [name for name in modules if name.lower().split("/")[-2] == wanted]
        if alike:
            found.append(max(alike, key=_version))
    return found


def _version(name: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", name.rpartition("/")[2])]
