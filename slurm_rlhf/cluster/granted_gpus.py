"""GPUs that Slurm granted on each node, by number and by type."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from slurm_rlhf.cluster.slurm_job import command
from slurm_rlhf.cluster.slurm_notation import expand, parse_gpus
from slurm_rlhf.errors import PlacementError

_NODES = re.compile(r"\bNodes=(\S+) CPU_IDs=\S* Mem=\S* GRES=(\S*)")
_ASKED = re.compile(r"\bTresPerNode=(\S+)")
_TYPE = re.compile(r"(?:gres[:/])?(?:gpu[:=/])?(?P<type>[A-Za-z][\w.+-]*)?(?=[:=(]|$)")
_VARIABLES = ("SLURM_GPUS_PER_NODE", "SLURM_GPUS", "SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK")
_OTHER = re.compile(r"gres[:/](?!gpu)|(?:cpu|mem|node|energy|billing|license|nic|shard|mps)\b")


def parse_job_details(text: str) -> dict[str, int]:
    """Return the number of GPUs on each node, from `scontrol show job --details`. Raises ValueError.

    A job that is alone on its nodes (--exclusive) has all of their GPUs, but its steps get no more on a node than
    --gres or --gpus-per-node asked for.
    """
    asked = _ASKED.search(text)
    most = parse_gpus(asked[1]) if asked else None
    gpus = {node: parse_gpus(granted) if granted not in ("", "(null)") else 0 for node, granted in _granted(text)}
    return {node: min(count, most) if most else count for node, count in gpus.items()}


def parse_types(text: str) -> dict[str, list[str]]:
    """Return the types of the GPUs on each node, from `scontrol show job --details`; nodes without any are left out."""
    return {node: types for node, granted in _granted(text) if (types := gpu_types(granted))}


def _granted(text: str) -> list[tuple[str, str]]:
    """Return each node with what it was granted, from the `Nodes=... GRES=...` parts."""
    return [(node, granted) for nodes, granted in _NODES.findall(text) for node in expand(nodes)]


def ask_scontrol(job_id: int, nodes: Sequence[str]) -> tuple[int, ...]:
    """Return how many GPUs job `job_id` has on each of `nodes`. Blocks for up to 30 s.

    Raises PlacementError where Slurm does not answer, or says nothing of one of the nodes.
    """
    answer = command(["scontrol", "show", "job", "--details", str(job_id)])
    problem = answer.stderr.strip() or f"exit code {answer.returncode}"
    try:
        if answer.returncode == 0:
            granted = parse_job_details(answer.stdout)
            missing = [node for node in nodes if node not in granted]
            if not missing:
                return tuple(granted[node] for node in nodes)
            problem = f"it names no GPUs of node {missing[0]}"
    except (ValueError, PlacementError) as error:
        problem = str(error)
    raise PlacementError(
        f"cannot tell how many GPUs job {job_id} has on each node: its environment does not say, and `scontrol show "
        f"job --details {job_id}` failed ({problem}): ask for the GPUs with --gpus-per-node"
    )


def gpu_types(text: str) -> list[str]:
    """List the types in a request or a grant: `gpu:a100:4(IDX:0-3),gpu:v100:2` -> a100, v100; none where untyped."""
    found = []
    for part in re.split(r",(?![^(]*\))", text):
        match = _TYPE.match(part.strip())
        if match and match["type"] and match["type"] != "gpu" and not _OTHER.match(part.strip()):
            found.append(match["type"])
    return list(dict.fromkeys(found))


def granted_types(environ: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the types of the GPUs on each node of the job in `environ`. Blocks for up to 30 s.

    Where scontrol does not answer, the variables that ask for GPUs count, under their names instead of a node's.
    """
    number = environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID")
    if not number:
        return {}
    try:
        found = parse_types(command(["scontrol", "show", "job", "--details", number], dict(environ)).stdout)
    except PlacementError:  # a list of nodes that does not parse
        found = {}
    asked = {name: gpu_types(environ[name]) for name in _VARIABLES if environ.get(name)}
    return found or {name: types for name, types in asked.items() if types}
