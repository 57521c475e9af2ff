"""The acceptance kit: what a GPU has to show, each check in a process of its own that cannot outlive its deadline.

`tests/kit/test_gpu.py` runs it on GPUs, `tests/kit/test_rehearsal.py` the same checks on CPUs, where gloo and shared
memory stand in for NCCL and CUDA IPC.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kit_gpus import GPUS

BUDGET_S = 600.0
"""Time for all checks together."""
SLOWER = 4.0
"""Factor by which everything may take longer in a rehearsal, on CPUs that others use."""
LEAST_S = 20.0
"""A check that would have less is not begun."""
PASSED, FAILED, SKIPPED = "passed", "FAILED", "skipped"

PROGRAM = Path(__file__).with_name("kit_check.py")
MARK = "SLURM_RLHF_GPU_CHECK"
"""A variable of everything that a check starts."""


@dataclass(frozen=True, slots=True)
class Check:
    """One row of the report."""

    name: str
    about: str
    run: str  # module:function; the function takes a Place and returns a Finding
    deadline_s: float
    gpus: int = 1  # the fewest that it needs
    nodes: int = 1
    why: str = ""  # the reason why it needs more than one GPU


@dataclass(frozen=True, slots=True)
class Place:
    """Where the checks run."""

    gpus: tuple[str, ...]  # names as in CUDA_VISIBLE_DEVICES; a rehearsal makes them up
    rehearse: bool = False
    nodes: tuple[str, ...] = ()  # nodes of the allocation, this one first; empty outside Slurm
    scratch: str = ""  # the check's own directory, which all nodes see

    def backend(self, wanted: str) -> str:
        """Return the backend that is to carry weights: on CPUs gloo stands in for nccl."""
        return {"nccl": "gloo"}.get(wanted, wanted) if self.rehearse else wanted


@dataclass(frozen=True, slots=True)
class Finding:
    """Holds the finding of a check: a line for people, numbers for programs."""

    figure: str
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Holds the outcome of a check that passed, failed or was skipped."""

    name: str
    about: str
    verdict: str
    figure: str  # or why it was skipped, or how it failed
    seconds: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)
    log: str = ""  # the last lines of one that failed


CHECKS = (
    # First, where there are several nodes: the kit may end before it comes to the last ones.
    Check("nodes", "every node's directory, packages, GPUs", "kit_nodes:look", 75, nodes=2),
    Check("nodes sync", "weights between nodes against the raw link", "kit_nodes:sync", 90, nodes=2),
    Check("nodes ppo", "PPO over all nodes", "kit_nodes:ppo", 180, nodes=2),
    Check("sync nccl", "weights by NCCL, byte for byte; abort; a death", "kit_sync:nccl", 75),
    Check("sync ipc", "the same on one GPU by CUDA IPC", "kit_sync:ipc", 75),
    Check("sync repair", "a rank killed amid an update: repeated", "kit_sync:repair", 60),
    Check("log-probs fp32", "engine against actor, same weights", "kit_engine:logprobs_fp32", 90),
    Check("log-probs bf16", "the same in bf16", "kit_engine:logprobs_bf16", 90),
    Check("sleep", "an engine gives up its memory and comes back", "kit_engine:sleep", 90),
    Check("zero 2", "two ranks of ZeRO-2 against one rank", "kit_train:zero2", 90),
    Check("zero 3", "two ranks of ZeRO-3 against one rank", "kit_train:zero3", 90),
    Check("ppo colocated", "PPO, TP 1, all roles share GPUs, with sleep", "kit_train:ppo_colocated", 150),
    Check(
        "ppo tp 1",
        "PPO, every role on a GPU of its own",
        "kit_train:ppo_tp1",
        150,
        gpus=3,
        why="actor, critic and engine have a GPU each; `ppo colocated` is TP 1 on one",
    ),
    Check("ppo tp 2", "PPO, an engine of two ranks", "kit_train:ppo_tp2", 150, gpus=2, why="one per TP rank"),
    Check("ulysses", "two ranks that share rows against one rank", "kit_train:ulysses", 90),
    Check("layers", "torch.compile, Liger, flash attention by name", "kit_layers:layers", 90),
    Check("lora", "GRPO with adapters, on one GPU", "kit_train:lora", 120),
    Check("bench sync", "a weight update against raw NCCL", "kit_bench:sync", 75),
    Check("bench train", "the actor's update: tokens/s, MFU", "kit_bench:train", 100),
    Check("bench rollout", "the engine: tokens/s", "kit_bench:rollout", 120),
)


def unfit(check: Check, place: Place, left_s: float) -> str:
    """Say why `check` is left out here; empty: it is not."""
    reason = ""
    if check.nodes > max(1, len(place.nodes)):
        reason = f"needs several GPUs: on {check.nodes} nodes, sbatch --nodes=2 sbatch/gpu_check.sh"
    elif check.gpus > len(place.gpus):
        reason = f"needs several GPUs: {check.gpus}, here are {len(place.gpus)}; {check.why}"
    elif left_s < LEAST_S:
        reason = f"the {BUDGET_S / 60:.0f} minutes of the kit were over"
    return reason


def perform(check: Check, place: Place, left_s: float = BUDGET_S) -> Outcome:
    """Run `check` in a process of its own, for its deadline or `left_s` seconds at most; nothing of it is left."""
    if why := unfit(check, place, left_s):
        return Outcome(check.name, check.about, SKIPPED, why)
    scratch = Path(place.scratch)
    scratch.mkdir(parents=True, exist_ok=True)
    (scratch / "place.json").write_text(json.dumps(asdict(place)))
    allowed = min(check.deadline_s * (SLOWER if place.rehearse else 1.0), left_s)
    began, mark = time.monotonic(), uuid.uuid4().hex
    root = PROGRAM.parents[1]
    stated = {MARK: mark, GPUS: "" if place.rehearse else ",".join(place.gpus)}
    stated |= {"PYTHONPATH": f"{root}{os.pathsep}{PROGRAM.parent}", "VLLM_HOST_IP": "127.0.0.1"}
    with (scratch / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, str(PROGRAM), check.run, str(scratch)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**_environment(check), **stated},
            start_new_session=True,
        )
        try:
            process.wait(allowed)
            late = ""
        except subprocess.TimeoutExpired:
            late = f"hung: ended after its {allowed:.0f} s; the stacks are in the log"
            ask_stacks(mark)
        finally:
            end_marked(mark)
            process.wait()
    return _outcome(check, scratch, late or f"its process ended with {process.returncode}", time.monotonic() - began)


def _environment(check: Check) -> dict[str, str]:
    """A check of one machine knows of no allocation: its runs start subprocesses and not steps of Slurm."""
    hidden = ("SLURM_",) if check.nodes == 1 else ()
    return {name: value for name, value in os.environ.items() if not name.startswith(hidden)}


def _outcome(check: Check, scratch: Path, otherwise: str, seconds: float) -> Outcome:
    """Read the outcome from the check's file; without one it failed `otherwise`."""
    answer = {"error": otherwise}
    with contextlib.suppress(OSError, ValueError):
        answer = json.loads((scratch / "finding.json").read_text())
    if "error" not in answer:
        return Outcome(check.name, check.about, PASSED, answer["figure"], seconds, answer["figures"])
    lines = 200 if "hung" in answer["error"] else 25
    words = (scratch / "log").read_text(errors="replace").strip().splitlines()[-lines:]
    return Outcome(check.name, check.about, FAILED, answer["error"], seconds, log="\n".join(words))


def ask_stacks(mark: str) -> None:
    """SIGUSR2 to every marked process that handles it: those of the kit write the stacks of their threads."""
    for entry in _marked(mark):
        with contextlib.suppress(OSError):
            caught = re.search(r"^SigCgt:\s*(\w+)", (entry / "status").read_text(), re.MULTILINE)
            if caught and int(caught[1], 16) >> (signal.SIGUSR2 - 1) & 1:
                os.kill(int(entry.name), signal.SIGUSR2)
    time.sleep(1.0)


def end_marked(mark: str) -> None:
    """SIGKILL to every process that has `mark` in its environment, until there is none.

    Processes of a run are sessions of their own, and parents that died leave theirs behind: the mark goes with all.
    """
    for _ in range(50):
        found = _marked(mark)
        if not found:
            return
        for entry in found:
            with contextlib.suppress(OSError):
                os.kill(int(entry.name), signal.SIGKILL)
        time.sleep(0.05)


def _marked(mark: str) -> list[Path]:
    word = f"{MARK}={mark}".encode()
    return [entry for entry in Path("/proc").iterdir() if entry.name.isdigit() and _has(entry, word)]


def _has(entry: Path, word: bytes) -> bool:
    try:
        return word in (entry / "environ").read_bytes().split(b"\0")
    except OSError:  # it ended, or is somebody else's
        return False
