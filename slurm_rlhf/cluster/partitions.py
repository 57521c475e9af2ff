"""What a cluster offers to a new run: the partitions of Slurm, and what its module system can load."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass

from slurm_rlhf.cluster.slurm_notation import parse_gpus
from slurm_rlhf.errors import RunError
from slurm_rlhf.wire import timeouts

_FORMAT = "%P|%D|%G|%l|%c|%a"


@dataclass(frozen=True, slots=True)
class Partition:
    """Describe nodes of one kind in a partition."""

    name: str
    default: bool
    nodes: int
    gpus: int  # GPUs of a node
    time: str  # in Slurm's words: 1-00:00:00, infinite
    cpus: int  # CPUs of a node
    up: bool

    def describe(self) -> str:
        """Put it into a line for a user who has to choose."""
        gpus = f"{self.gpus} GPUs" if self.gpus else "no GPUs"
        mark = " (default)" if self.default else ""
        return f"{self.name}{mark}: {self.nodes} nodes of {gpus} and {self.cpus} CPUs, at most {self.time}"


def parse_partitions(text: str) -> list[Partition]:
    """Parse the output of `sinfo --noheader --format=...`; lines of another form are left out."""
    found = []
    for line in text.splitlines():
        fields = [field.strip() for field in line.split("|")]
        if len(fields) != 6 or not fields[1].isdigit():
            continue
        name, nodes, gres, time, cpus, state = fields
        gpus = 0 if gres.startswith("(") else parse_gpus(gres)  # (null): no generic resources
        found.append(
            Partition(
                name.rstrip("*"),
                name.endswith("*"),
                int(nodes),
                gpus,
                time,
                int(cpus.rstrip("+") or 0) if cpus.rstrip("+").isdigit() else 0,
                state == "up",
            )
        )
    return found


def ask_partitions() -> list[Partition]:
    """Ask sinfo; empty where there is no Slurm. Raises RunError where slurmctld does not answer."""
    if shutil.which("sinfo") is None:
        return []
    command = ["sinfo", "--noheader", f"--format={_FORMAT}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeouts.SLURM_S, check=False)
    except subprocess.TimeoutExpired:
        raise RunError(f"sinfo has not answered for {timeouts.SLURM_S:g} s: is slurmctld up?") from None
    if done.returncode:
        raise RunError(f"sinfo failed: {done.stderr.strip()}")
    return [partition for partition in parse_partitions(done.stdout) if partition.up]


def best(partitions: list[Partition]) -> Partition | None:
    """Choose the one to propose: most GPUs per node, then the default one, then most nodes."""
    return max(partitions, key=lambda each: (each.gpus, each.default, each.nodes), default=None)


WANTED = ("cuda", "python", "gcc", "nccl", "openmpi")
"""What a run may need, in the order in which it is loaded."""
_NAME = re.compile(r"[A-Za-z0-9][\w.+-]*(/[\w.+-]+)+")


def ask_modules() -> list[str]:
    """List the modules that there are, in the order of `module avail`; empty where there is no module system."""
    command = _command()
    if command is None:
        return []
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeouts.SLURM_S, check=False)
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
