"""Read the environment variables of Slurm into one typed object, and Slurm's lists of nodes and numbers of GPUs.

In a step (`srun`) some variables describe the step, others the whole job. Variables that are not needed are not read,
so that a malformed one cannot stop a run.

A list of nodes looks like `gpu[001-003,007],login1,rack[1-2]-n[01-04]`. `scontrol show hostnames` expands it, too, but
many containers lack it, and its exit code is 0 for an invalid list.

    list    = element { (comma | blank) element }
    element = { text | "[" range { "," range } "]" }; with a bracket, the element ends with one
    range   = digits [ "-" digits ]; the zeros of the first number set the width
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from itertools import product, zip_longest
from typing import Any

from slurm_rlhf.errors import PlacementError
from slurm_rlhf.placement.topology import CPU, GPU, Node, Topology

MAX_RANGE = 65536
"""Limit of Slurm on the numbers of one range."""
MAX_NAMES = 1 << 20
"""Limit on the names of one element."""

_ELEMENT = re.compile(r"(?:(?:[\w.\-]*\[[\d,\-]+\])+|[\w.\-]+)(?=[ \t\n,]|\Z)", re.ASCII)
_RANGE = re.compile(r"(\d+)(?:-(\d+))?", re.ASCII)


def expand(text: str) -> list[str]:
    """Expand the node list `text` to host names, in the order of `scontrol show hostnames`, repetitions included.

    Raises PlacementError for text that is no list, and for an empty list.
    """
    if _ELEMENT.sub("", text).strip(" \t\n,"):
        raise PlacementError(f"invalid node list {text!r}: its elements are like login1 or gpu[001-003,007]")
    names = [name for element in _ELEMENT.findall(text) for name in _node_names(element)]
    if not names:
        raise PlacementError(f"the node list {text!r} names no node")
    return names


def slurm_order(names: Iterable[str]) -> list[str]:
    """Sort host names as Slurm lists the nodes of a job (`scontrol show hostlistsorted`).

    First by the text before the last number, in which digits are compared as numbers; then names without a number,
    shorter numbers, smaller numbers. Source: `hostrange_cmp` in Slurm's common/hostlist.c, seen in 22.05.
    """
    return sorted(names, key=_slurm_key)


def _slurm_key(name: str) -> tuple[object, ...]:
    before = name.rstrip("0123456789")
    number = name[len(before) :]
    natural = [int(part) if index % 2 else part for index, part in enumerate(re.split(r"(\d+)", before))]
    return natural, len(number), int(number or 0)


def _node_names(element: str) -> Iterator[str]:
    parts = re.split(r"\[(.*?)\]", element)
    numbers = [_numbers(ranges) for ranges in parts[1::2]]
    if math.prod(map(len, numbers)) > MAX_NAMES:
        raise PlacementError(f"invalid node list: {element} has more than {MAX_NAMES} names")
    # scontrol's order: the last bracket runs fastest, then the first, the second, ...
    for chosen in product(*numbers[-2::-1], *numbers[-1:]):
        values = (*chosen[-2::-1], *chosen[-1:])
        yield "".join(map("".join, zip_longest(parts[::2], values, fillvalue="")))


def _numbers(ranges: str) -> list[str]:
    values: list[str] = []
    for each in ranges.split(","):
        match = _RANGE.fullmatch(each)
        if match is None or not 0 <= int(match[2] or match[1]) - int(match[1]) < MAX_RANGE:
            raise PlacementError(
                f"invalid node list: [{ranges}] has {each!r}, which is no number, and no range of up to {MAX_RANGE} "
                "numbers that runs upwards"
            )
        values += [str(number).zfill(len(match[1])) for number in range(int(match[1]), int(match[2] or match[1]) + 1)]
    return values


_REPEATED = re.compile(r"(\d+)(?:\(x(\d+)\))?")
_MAX_NODES = 1 << 20
_OTHER_RESOURCE = re.compile(
    r"(?:gres[:/](?!gpu)|(?:cpu|mem|vmem|node|energy|billing|pages|license|bb|fs|ic|nic|mps|shard)\b)"
)
# gpu:a100:4(S:0-1), gres/gpu:a100=4, gres:gpu:2, a100:4, 4, gpu(IDX:0-3)
_GPU = re.compile(
    r"(?:gres[:/])?(?:gpu(?:[:=][A-Za-z][\w.+-]*)?|[A-Za-z][\w.+-]*)?"
    r"(?:[:=]?(?P<count>\d+))?(?:\([^()]*\))?"
)


def expand_counts(text: str) -> tuple[int, ...]:
    """Expand counts: `8(x3),4` -> (8, 8, 8, 4). Raises ValueError."""
    counts: list[int] = []
    for part in text.split(","):
        match = _REPEATED.fullmatch(part.strip())
        if match is None or int(match[2] or 1) > _MAX_NODES:
            raise ValueError(f"expected counts like 8(x15),4, got {part!r}")
        counts.extend([int(match[1])] * int(match[2] or 1))
    return tuple(counts)


def per_node(counts: tuple[int, ...], nodes: int) -> tuple[int, ...]:
    """Return one count for each of `nodes` nodes; a single count is for all of them. Raises ValueError."""
    if len(counts) == 1:
        return counts * nodes
    if len(counts) != nodes:
        raise ValueError(f"{len(counts)} counts for {nodes} nodes")
    return counts


def parse_gpus(text: str) -> int:
    """Count the GPUs in a request: `8`, `a100:4`, `gpu:2`, `gpu:a100:4(S:0-1)`, `gres/gpu=8`, `a100:4,v100:2`.

    Other resources in the list (`cpu=4`, `gres/shard:2`, `nic:1`) are ignored; a type without a number is one GPU.
    Raises ValueError.
    """
    total = 0
    for part in map(str.strip, re.split(r",(?![^(]*\))", text)):  # at commas outside of parentheses
        if _OTHER_RESOURCE.match(part):
            continue
        match = _GPU.fullmatch(part)
        if match is None or not part:
            raise ValueError(f"expected GPUs like 8, a100:4 or gpu:a100:4, got {part!r}")
        total += int(match["count"] or 1)
    return total


_FIRST_RESERVED_STEP = 0xFFFFFFF0  # batch, extern and interactive steps


def _step_id(text: str) -> int | None:
    number = int(text) if text.isdigit() else _FIRST_RESERVED_STEP
    return number if number < _FIRST_RESERVED_STEP else None


def _names(text: str) -> tuple[str, ...]:
    return tuple(expand(text))


def _variable(*names: str, parse: Callable[[str], Any], default: Any = None) -> Any:
    """Declare a field that is parsed from the first variable of `names` that is set and not empty."""
    return field(default=default, metadata={"names": names, "parse": parse})


@dataclass(frozen=True, slots=True)
class SlurmEnvironment:
    """Hold Slurm's description of the job. Absent variables are None, 0, "" or ()."""

    job_id: int = _variable("SLURM_JOB_ID", "SLURM_JOBID", parse=int)
    job_name: str = _variable("SLURM_JOB_NAME", parse=str, default="")
    job_nodes: tuple[str, ...] = _variable("SLURM_JOB_NODELIST", "SLURM_NODELIST", parse=_names, default=())
    num_nodes: int | None = _variable("SLURM_JOB_NUM_NODES", "SLURM_NNODES", parse=int)
    cpus_per_node: tuple[int, ...] = _variable("SLURM_JOB_CPUS_PER_NODE", parse=expand_counts, default=())
    # None in the batch script, in salloc's shell and in its interactive step.
    step_id: int | None = _variable("SLURM_STEP_ID", "SLURM_STEPID", parse=_step_id)
    # GPUs of the job (or the step) on this node.
    gpus_on_node: int | None = _variable("SLURM_GPUS_ON_NODE", parse=parse_gpus)
    # The request; None: there is none, or it was made in another way.
    gpus_per_node: int | None = _variable("SLURM_GPUS_PER_NODE", parse=parse_gpus)
    gpus_total: int | None = _variable("SLURM_GPUS", parse=parse_gpus)  # the request for all nodes together
    node_name: str = _variable("SLURMD_NODENAME", parse=str, default="")
    restart_count: int = _variable("SLURM_RESTART_COUNT", parse=int, default=0)  # how often this job was requeued
    array_job_id: int | None = _variable("SLURM_ARRAY_JOB_ID", parse=int)
    array_task_id: int | None = _variable("SLURM_ARRAY_TASK_ID", parse=int)
    end_time: int | None = _variable("SLURM_JOB_END_TIME", parse=int)  # seconds since the epoch; from Slurm 23.02
    submit_dir: str = _variable("SLURM_SUBMIT_DIR", parse=str, default="")
    het_size: int = _variable("SLURM_HET_SIZE", parse=int, default=1)

    def gpus(self) -> tuple[int, ...] | None:
        """Return the GPUs of the job on each node; None if the variables do not tell, but `ask_scontrol` may.

        They tell it if the request per node equals the number on this node; a job that was submitted inside another job
        inherits the other's request. In a step the number on this node may be that of the step.
        """
        count, here, asked, outside = len(self.job_nodes), self.gpus_on_node, self.gpus_per_node, self.step_id is None
        if here is None and asked is None:
            return (0,) * count if self.node_name else None
        if asked is not None and (here in (None, asked) or not outside):
            return (asked,) * count
        return (here,) if here is not None and outside and count == 1 else None

    def topology(self, gpus: Sequence[int]) -> Topology:
        """Build the topology of the job's nodes with `gpus` on each; without GPUs it has 0 slots, accelerator "cpu"."""
        cpus = self.cpus_per_node or (0,) * len(gpus)
        nodes = tuple(Node(*row) for row in zip(self.job_nodes, gpus, cpus, strict=True))
        return Topology(nodes, GPU if any(gpus) else CPU)


def read_slurm(environ: Mapping[str, str]) -> SlurmEnvironment | None:
    """Read the Slurm environment in `environ`; None outside a job.

    Raises PlacementError with the variable that does not parse or contradicts another.
    """
    if not any(environ.get(name) for name in ("SLURM_JOB_ID", "SLURM_JOBID")):
        return None
    values = {each.name: _read(environ, each) for each in fields(SlurmEnvironment)}
    if values["het_size"] > 1:
        raise PlacementError(
            f"this is a heterogeneous job of {values['het_size']} components (SLURM_HET_SIZE), and roles can only be "
            "placed on the nodes of one job: submit one job with --nodes and --gpus-per-node, and what serves rewards "
            "on CPU nodes as another (slurm-rlhf docs rewards)"
        )
    if not values["job_nodes"]:
        raise PlacementError(
            f"SLURM_JOB_ID is {values['job_id']}, but SLURM_JOB_NODELIST is not set: unset SLURM_JOB_ID to run outside "
            "Slurm, or start from the batch script, salloc or srun"
        )
    _check_counts(values)
    return SlurmEnvironment(**values)


def _read(environ: Mapping[str, str], wanted: Field[Any]) -> Any:
    for name in wanted.metadata["names"]:
        text = environ.get(name, "").strip()
        if text:
            try:
                return wanted.metadata["parse"](text)
            except (ValueError, PlacementError) as error:
                raise PlacementError(f"the environment variable {name}={text!r} does not parse: {error}") from error
    return wanted.default


def _check_counts(values: dict[str, Any]) -> None:
    nodes = len(values["job_nodes"])
    if values["step_id"] is None and values["num_nodes"] not in (None, nodes):
        raise PlacementError(
            f"SLURM_JOB_NUM_NODES is {values['num_nodes']}, but SLURM_JOB_NODELIST names {nodes} nodes: one of them "
            "was changed by hand or by a container"
        )
    if values["cpus_per_node"]:
        try:
            values["cpus_per_node"] = per_node(values["cpus_per_node"], nodes)
        except ValueError as error:
            raise PlacementError(f"SLURM_JOB_CPUS_PER_NODE: {error}") from error
