"""What kind of GPUs there are: by nvidia-smi on this node, by Slurm's types on all nodes of the allocation."""

from __future__ import annotations

import re
from collections.abc import Mapping

from slurm_rlhf.cluster.devices import local_gpus
from slurm_rlhf.cluster.gpu_query import ask_gpus
from slurm_rlhf.cluster.job import command
from slurm_rlhf.cluster.nodelist import expand
from slurm_rlhf.errors import PlacementError

_NODES = re.compile(r"\bNodes=(\S+) CPU_IDs=\S* Mem=\S* GRES=(\S*)")
_TYPE = re.compile(r"(?:gres[:/])?(?:gpu[:=/])?(?P<type>[A-Za-z][\w.+-]*)?(?=[:=(]|$)")
_VARIABLES = ("SLURM_GPUS_PER_NODE", "SLURM_GPUS", "SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK")
_OTHER = re.compile(r"gres[:/](?!gpu)|(?:cpu|mem|node|energy|billing|license|nic|shard|mps)\b")


def gpu_types(text: str) -> list[str]:
    """The types in a request or a grant of GPUs: `gpu:a100:4(IDX:0-3),gpu:v100:2` -> a100, v100; none where untyped."""
    found = []
    for part in re.split(r",(?![^(]*\))", text):
        match = _TYPE.match(part.strip())
        if match and match["type"] and match["type"] != "gpu" and not _OTHER.match(part.strip()):
            found.append(match["type"])
    return list(dict.fromkeys(found))


def parse_types(details: str) -> dict[str, list[str]]:
    """Node -> types of its GPUs, from `scontrol show job --details`; nodes without a typed GPU are left out."""
    found = {node: gpu_types(granted) for nodes, granted in _NODES.findall(details) for node in expand(nodes)}
    return {node: types for node, types in found.items() if types}


def granted_types(environ: Mapping[str, str]) -> dict[str, list[str]]:
    """Node -> types of the GPUs that the job in `environ` has there, as far as Slurm has types. Blocks for up to 30 s.

    Where scontrol is silent, what was asked for is taken, under the name of the variable that says it.
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


def local_kinds(environ: Mapping[str, str]) -> list[tuple[str, float]]:
    """Name and MiB of each GPU that a process with `environ` may use here; empty where nvidia-smi shows none."""
    names = local_gpus(environ)
    chosen = ask_gpus(environ).chosen(names) if names else ()
    return [(gpu.name, float(gpu.memory_mib)) for gpu in chosen if gpu.memory_mib]
