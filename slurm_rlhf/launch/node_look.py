"""Look at processes of this node from outside: `python -m slurm_rlhf.launch.node_look DIRECTORY NODE=PID,PID...`.

It writes `DIRECTORY/NODE.json`: the node's load, the state of each process, and its stack where py-spy is installed
and may look. It runs when a run hangs and never before, so that a run that is well pays nothing. A rank may be stopped,
or in the kernel: this needs nothing of it.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from slurm_rlhf.cluster.processes import node_load, process_state
from slurm_rlhf.cluster.resources import node_name
from slurm_rlhf.run_directory import write_atomically

SPY = "py-spy"
_SPY_S = 8.0
_AT_ONCE = 4


@dataclass(frozen=True, slots=True)
class ProcessView:
    """Says what a node sees of one process."""

    pid: int
    state: str  # empty: there is no such process
    spy: str = ""  # what py-spy printed
    no_spy: str = ""  # why it did not


@dataclass(frozen=True, slots=True)
class NodeView:
    """Says what a node sees."""

    node: str
    load: str
    processes: tuple[ProcessView, ...]

    @classmethod
    def read(cls, path: Path) -> NodeView:
        """Read what `main` wrote. Raises OSError, ValueError."""
        data = json.loads(path.read_text(encoding="utf-8"))
        return cls(data["node"], data["load"], tuple(ProcessView(**each) for each in data["processes"]))


def look(node: str, pids: Sequence[int], spy: str | None = None) -> NodeView:
    """Look at the processes; `spy`: the program, None: find it on the path or beside this Python."""
    program = spy or _program()
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return NodeView(node, node_load(), tuple(pool.map(lambda pid: _process(pid, program), pids)))


def _program() -> str | None:
    return shutil.which(SPY) or shutil.which(SPY, path=str(Path(sys.executable).parent))


def _process(pid: int, program: str | None) -> ProcessView:
    state = process_state(pid)
    if program is None:
        return ProcessView(pid, state, no_spy="py-spy is not installed (pip install py-spy)")
    # It pauses the process for a moment, which one that is stopped already does not take.
    how = ["--nonblocking"] if state.startswith("T") else []
    words = [program, "dump", "--full-filenames", *how, "--pid", str(pid)]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_SPY_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return ProcessView(pid, state, no_spy=f"py-spy: {error}")
    if done.returncode == 0:
        return ProcessView(pid, state, done.stdout)
    why = (done.stderr.strip().splitlines() or ["it gave no reason"])[0]
    if "ermission" in done.stderr:
        why += " (ptrace is forbidden here: kernel.yama.ptrace_scope, or a container without CAP_SYS_PTRACE)"
    return ProcessView(pid, state, no_spy=f"py-spy: {why}")


def look_here(node: str, pids: Sequence[int], directory: Path) -> None:
    """Write what this node, whose name is `node`, sees of the processes. Raises OSError."""
    view = look(node, pids)
    write_atomically(directory / f"{node}.json", json.dumps(asdict(view), indent=1) + "\n")


def arguments(pids: Mapping[str, Sequence[int]]) -> list[str]:
    """Return the words that tell `main` which processes each node has."""
    return [f"{node}={','.join(map(str, numbers))}" for node, numbers in pids.items()]


def main() -> None:
    directory, words = Path(sys.argv[1]), sys.argv[2:]
    known = {node: [int(pid) for pid in numbers.split(",")] for node, _, numbers in (w.partition("=") for w in words)}
    node = node_name()
    look_here(node, known.get(node, []), directory)


if __name__ == "__main__":
    main()
