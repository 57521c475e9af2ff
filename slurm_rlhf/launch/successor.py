"""Describe the job that follows this one where requeue is forbidden: the same script, arguments and options.

The options on the command line of sbatch are in no script: they are read from what Slurm shows of the job. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurm_rlhf.launch.node_environment import GPU_VARIABLES

OPTION_OF_FIELD = {
    "JobName": "--job-name",
    "Partition": "--partition",
    "Account": "--account",
    "QOS": "--qos",
    "Reservation": "--reservation",
    "TimeLimit": "--time",
    "NumNodes": "--nodes",
    "MinMemoryNode": "--mem",
    "MinMemoryCPU": "--mem-per-cpu",
    "ReqNodeList": "--nodelist",
    "ExcNodeList": "--exclude",
    "Features": "--constraint",
    "Licenses": "--licenses",
    "Comment": "--comment",
    "MailUser": "--mail-user",
    "MailType": "--mail-type",
    "WorkDir": "--chdir",
}
"""Field of `scontrol show job` -> option of sbatch."""

OPTION_OF_VARIABLE = {
    "SLURM_NTASKS": "--ntasks",
    "SLURM_NTASKS_PER_NODE": "--ntasks-per-node",
    "SLURM_CPUS_PER_TASK": "--cpus-per-task",
    "SLURM_GPUS": "--gpus",
    "SLURM_GPUS_PER_NODE": "--gpus-per-node",
    "SLURM_GPUS_PER_TASK": "--gpus-per-task",
    "SLURM_MEM_PER_GPU": "--mem-per-gpu",
    "SLURM_EXPORT_ENV": "--export",
    "SLURM_ARRAY_TASK_ID": "--array",
}
"""Variable of the batch script -> option. Slurm sets it only if the option was given."""

_OVERSUBSCRIBE = {"NO": "--exclusive", "USER": "--exclusive=user", "YES": "--oversubscribe"}
_EMPTY = {"", "(null)", "N/A"}
_GPU = re.compile(r"gres[:/]gpu\b")


@dataclass(frozen=True, slots=True)
class Successor:
    """Hold the command line of sbatch: options, the script as it was submitted (it may be gone), its arguments."""

    options: list[str]
    script: str
    arguments: list[str]


def successor(shown: str, environ: Mapping[str, str], argv: Sequence[str]) -> Successor:
    """Return the job after the one that `scontrol show job` describes in `shown`.

    `environ` of its batch step; `argv`: the words that the script gave to this program.
    """
    options = [f"{option}={value}" for field, option in OPTION_OF_FIELD.items() if (value := _field(shown, field))]
    options += [f"{option}={environ[name]}" for name, option in OPTION_OF_VARIABLE.items() if environ.get(name)]
    options += _resources(shown, environ) + _files(shown)
    if sharing := _OVERSUBSCRIBE.get(_field(shown, "OverSubscribe")):
        options.append(sharing)
    if _field(shown, "Requeue") == "0":
        options.append("--no-requeue")
    return Successor(options, *split_command(_line(shown, "Command"), argv))


def split_command(command: str, argv: Sequence[str]) -> tuple[str, list[str]]:
    """Split `command`, which Slurm shows as words with blanks between them, into script and arguments.

    A script that ends in `exec slurm-rlhf train FILE "$@"` has passed its arguments on: what `argv` and `command` both
    end with are these arguments, blanks inside them included. Arguments that it did not pass on are split at blanks.
    """
    for first in range(len(argv)):
        tail = list(argv[first:])
        if command.endswith(text := " " + " ".join(tail)):
            script, own = _split_head(command.removesuffix(text))
            return script, own + tail
    return _split_head(command)


def successor_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Copy `environ` for sbatch without what Slurm has set: the next job would take it for its own."""
    return {
        name: value
        for name, value in environ.items()
        if name == "SLURM_CONF" or not (name.startswith(("SLURM_", "SLURMD_")) or name in GPU_VARIABLES)
    }


def _split_head(head: str) -> tuple[str, list[str]]:
    if Path(head).is_file():
        return head, []
    script, *own = head.split(" ")
    return script, own


def _resources(shown: str, environ: Mapping[str, str]) -> list[str]:
    """Return --gres without what --gpus-per-node asks for: Slurm would add the two."""
    items = [item for item in _field(shown, "TresPerNode").split(",") if item]
    if environ.get("SLURM_GPUS_PER_NODE"):
        items = [item for item in items if not _GPU.match(item)]
    names = ",".join(re.sub(r"^gres[:/]", "", item) for item in items)
    return [f"--gres={names}"] if names else []


def _files(shown: str) -> list[str]:
    """Return the options that append to the same logs, as after a requeue."""
    out, err = _line(shown, "StdOut"), _line(shown, "StdErr")
    words = ["--open-mode=append"]
    if out:
        words.append(f"--output={out.replace('%', '%%')}")
    if err and err != out:
        words.append(f"--error={err.replace('%', '%%')}")
    return words


def _field(shown: str, name: str) -> str:
    """Return the value of `name`, or "". JobName, Comment and WorkDir may hold blanks, the others do not."""
    if name in ("JobName", "Comment", "WorkDir"):
        return _line(shown, name)
    found = re.search(rf"(?:^|\s){re.escape(name)}=(\S*)", shown)
    return "" if found is None or found[1] in _EMPTY else found[1]


def _line(shown: str, name: str) -> str:
    """Return what follows `name` up to the end of its line."""
    found = re.search(rf"(?:^|\s){name}=(.*)$", shown, re.MULTILINE)
    value = found[1] if found else ""
    if name != "Command":
        value = value.strip()
    return "" if value in _EMPTY else value
