"""Check the nodes before anything starts: the run directory, the same packages, usable GPUs."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slurm_rlhf.cluster.resources import node_name
from slurm_rlhf.errors import ConfigError, PlacementError, RunError, shortened, shortened_lines
from slurm_rlhf.launch.accelerators import Wanted, judge_accelerators
from slurm_rlhf.launch.probe import equipment, versions
from slurm_rlhf.launch.srun import HOST, Container, Step, step_command, step_environment

_TIMEOUT_S = 60.0
NOTHING = Wanted({})


def check_here(wanted: Wanted, environ: Mapping[str, str]) -> list[str]:
    """Check this machine alone; return notes for the user. Raises as `judge_accelerators`. Blocks for a second."""
    here = node_name(environ)
    said = {here: equipment(gpus=True)}  # without GPUs the reason is of interest
    return judge_accelerators(said, wanted, "start it where nvidia-smi shows GPUs")


def check_nodes(
    run_dir: Path, nodes: Sequence[str], container: Container = HOST, wanted: Wanted = NOTHING, gpus: Sequence[int] = ()
) -> list[str]:
    """Check all `nodes` with one step over them; return notes. Blocks for a second or two, at most for a minute.

    In a container the nodes are compared with each other, and this process needs nothing but slurm_rlhf itself.
    `gpus`: the number on each node, for the step.

    Raises ConfigError or PlacementError naming the nodes and the remedy, RunError when the step cannot be started.
    """
    step = Step(
        "preflight",
        tuple(nodes),
        gpus=tuple(gpus),
        together=False,
        uneven=len(set(gpus)) > 1,
        options=container.step_options(),
    )
    look = ("--gpus",) if wanted.slots else ()
    with canary_in(run_dir) as (canary, token):
        out, err = _run(step, container.command("slurm_rlhf.launch.probe", str(canary), *look, gpus=bool(look)))
    answers = _answers(out)
    here = versions()
    if container.image and answers:
        here = {**next(iter(answers.values()))["versions"], "slurm_rlhf": here["slurm_rlhf"]}
    judge(answers, nodes, run_dir, token, here, err, container.command("...", gpus=False)[:-2])
    return judge_accelerators(answers, wanted, "ask for them with sbatch --gpus-per-node")


@contextmanager
def canary_in(run_dir: Path) -> Iterator[tuple[Path, str]]:
    """Write a file into the run directory that other nodes are asked to read; yield it and its contents."""
    run_dir.mkdir(parents=True, exist_ok=True)
    token = secrets.token_hex(16)
    canary = run_dir / f".canary.{token}"
    canary.write_text(token, encoding="utf-8")
    try:
        yield canary, token
    finally:
        canary.unlink(missing_ok=True)


def _run(step: Step, command: list[str]) -> tuple[str, str]:
    """Return what the step printed, and the error output of srun."""
    try:
        done = subprocess.run(
            step_command(step, command),
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
            stdin=subprocess.DEVNULL,
            env=step_environment(os.environ),
        )
    except subprocess.TimeoutExpired as late:
        return _text(late.stdout), _text(late.stderr)
    except OSError as error:
        raise RunError(
            f"srun cannot be started: {error}. The batch script needs Slurm's commands on its PATH"
        ) from None
    return done.stdout, done.stderr


def judge(
    answers: Mapping[str, Mapping[str, Any]],
    nodes: Sequence[str],
    run_dir: Path,
    token: str,
    here: Mapping[str, str],
    said: str,
    started: Sequence[str] = (sys.executable,),
) -> None:
    """Raise for what is wrong with `answers` (node -> what `probe.answer` returned).

    `said`: the error output of srun; `started`: the interpreter, and the words before it.
    """
    silent = [node for node in nodes if node not in answers]
    if silent:
        lines = said.strip().splitlines()[-8:]
        words = "".join(f"\n    {line}" for line in lines)
        raise PlacementError(
            f"no answer from {shortened(silent, 4)}{'; srun says:' if lines else ''}{words}\n"
            f"If that names nothing to mend: {' '.join(started)} did not run there. Install the environment on a file "
            "system that all nodes share, or at the same place on each; leave a broken node out with sbatch --exclude."
        )
    blind = [node for node in nodes if answers[node]["canary"] != token]
    if blind:
        seen = shortened([node for node in nodes if node not in blind] or ["the node that runs the conductor"], 4)
        raise ConfigError(
            f"run_dir {run_dir} is not shared by all nodes: {shortened(blind, 4)} cannot see what {seen} wrote "
            "there. Put it on a file system that every node mounts (often /scratch or your home; not /tmp): "
            "--run_dir=/SHARED/DIRECTORY"
        )
    locked = [node for node in nodes if not answers[node]["writable"]]
    if locked:
        raise ConfigError(f"run_dir {run_dir} cannot be written on {shortened(locked, 4)}: mount it there for writing")
    unlike = [line for node in nodes for line in _unlike(node, answers[node]["versions"], here)]
    if unlike:
        raise ConfigError(
            "the nodes do not have the same packages as the node that runs the conductor:"
            f"{shortened_lines(unlike, 8)}\nInstall one environment on a file system that all nodes share, or the same "
            "one on each."
        )


def _unlike(node: str, there: Mapping[str, str], here: Mapping[str, str]) -> list[str]:
    return [f"{node}: {name} {there.get(name)}, here {mine}" for name, mine in here.items() if there.get(name) != mine]


def _answers(out: str) -> dict[str, dict[str, Any]]:
    found = {}
    for line in out.splitlines():
        try:
            answer = json.loads(line)
            found[str(answer["node"])] = answer
        except (ValueError, KeyError, TypeError):
            continue  # a message of the day, a module's greeting
    return found


def _text(said: bytes | str | None) -> str:
    return said.decode(errors="replace") if isinstance(said, bytes) else said or ""
