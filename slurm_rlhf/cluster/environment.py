"""Slurm's environment variables, read in one table into one typed object.

Inside a step (`srun`) some variables describe the step and others still the whole job: the step's come first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slurm_rlhf.cluster.nodelist import expand
from slurm_rlhf.cluster.slurm_counts import count_devices, expand_counts, parse_gpus, per_node
from slurm_rlhf.errors import PlacementError
from slurm_rlhf.placement.topology import CPU, GPU, Node, Topology

_FIRST_RESERVED_STEP = 0xFFFFFFF0  # batch, extern and interactive steps: not steps of ours


def _step_id(text: str) -> int | None:
    number = int(text) if text.isdigit() else _FIRST_RESERVED_STEP
    return number if number < _FIRST_RESERVED_STEP else None


def _names(text: str) -> tuple[str, ...]:
    return tuple(expand(text))


@dataclass(frozen=True, slots=True)
class Variable:
    """One row of the table: the first of `names` that is set and not empty is parsed."""

    names: tuple[str, ...]
    parse: Callable[[str], Any]
    default: Any = None


_SHAPE_TABLE = {
    "het_size": Variable(("SLURM_HET_SIZE",), int, 1),
    "step_id": Variable(("SLURM_STEP_ID", "SLURM_STEPID"), _step_id),
    "step_nodes": Variable(("SLURM_STEP_NODELIST",), _names, ()),
    "step_tasks_per_node": Variable(("SLURM_STEP_TASKS_PER_NODE",), expand_counts, ()),
}

TABLE = {
    "job_id": Variable(("SLURM_JOB_ID", "SLURM_JOBID"), int),
    "job_name": Variable(("SLURM_JOB_NAME",), str, ""),
    "cluster": Variable(("SLURM_CLUSTER_NAME",), str, ""),
    "partition": Variable(("SLURM_JOB_PARTITION",), str, ""),
    "job_nodes": Variable(("SLURM_JOB_NODELIST", "SLURM_NODELIST"), _names, ()),
    "num_nodes": Variable(("SLURM_JOB_NUM_NODES", "SLURM_NNODES"), int),
    "cpus_per_node": Variable(("SLURM_JOB_CPUS_PER_NODE",), expand_counts, ()),
    "cpus_per_task": Variable(("SLURM_CPUS_PER_TASK",), int, 0),
    "tasks_per_node": Variable(("SLURM_TASKS_PER_NODE",), expand_counts, ()),
    "gpus_on_node": Variable(("SLURM_GPUS_ON_NODE",), parse_gpus),
    "gpus_per_node": Variable(("SLURM_GPUS_PER_NODE",), parse_gpus),
    "gpus_per_task": Variable(("SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK"), parse_gpus),
    "gpus_total": Variable(("SLURM_GPUS",), parse_gpus),
    "gpu_ids": Variable(("SLURM_JOB_GPUS", "SLURM_STEP_GPUS"), count_devices),
    "node_name": Variable(("SLURMD_NODENAME",), str, ""),
    "node_id": Variable(("SLURM_NODEID",), int, 0),
    "task": Variable(("SLURM_PROCID",), int, 0),
    "local_task": Variable(("SLURM_LOCALID",), int, 0),
    "restart_count": Variable(("SLURM_RESTART_COUNT",), int, 0),
    "array_job_id": Variable(("SLURM_ARRAY_JOB_ID",), int),
    "array_task_id": Variable(("SLURM_ARRAY_TASK_ID",), int),
    "end_time": Variable(("SLURM_JOB_END_TIME",), int),
    "submit_dir": Variable(("SLURM_SUBMIT_DIR",), str, ""),
    "topology_address": Variable(("SLURM_TOPOLOGY_ADDR",), str, ""),
}
"""Field of SlurmEnvironment -> where it is read."""


@dataclass(frozen=True, slots=True)
class SlurmEnvironment:
    """What Slurm tells a process. Absent variables are None, 0, "" or ()."""

    job_id: int
    job_name: str
    cluster: str
    partition: str
    job_nodes: tuple[str, ...]  # of the job, in Slurm's order
    num_nodes: int | None
    cpus_per_node: tuple[int, ...]  # of the job, for each node
    cpus_per_task: int
    tasks_per_node: tuple[int, ...]  # of the step if there is one, for each of its nodes
    gpus_on_node: int | None  # GPUs that the job (or the step) has on this node
    gpus_per_node: int | None  # as asked for; None: not asked for this way
    gpus_per_task: int | None
    gpus_total: int | None
    gpu_ids: int | None
    node_name: str
    node_id: int  # of the step if there is one
    task: int  # of the step if there is one
    local_task: int
    restart_count: int  # how often this job was requeued
    array_job_id: int | None
    array_task_id: int | None
    end_time: int | None  # seconds since the epoch; from Slurm 23.02
    submit_dir: str
    topology_address: str  # e.g. spine.leaf1.gpu001
    step_id: int | None  # None in the batch script, in salloc's shell and in its interactive step
    step_nodes: tuple[str, ...]

    @property
    def nodes(self) -> tuple[str, ...]:
        """The step's nodes, or the job's outside a step."""
        return self.step_nodes or self.job_nodes

    def gpus(self) -> tuple[int, ...] | None:
        """GPUs of the job on each of `job_nodes`, zeros where Slurm granted none; None where the variables do not tell.

        They do not in the shell of `salloc --gres`, when a total (`--gpus`) does not divide evenly, and when what was
        asked for is not what this node has: a job that is submitted from within another one inherits variables of that
        one, such as SLURM_GPUS_PER_TASK. Then `granted.ask_scontrol` knows.
        """
        here = self.gpus_here
        asked = self._asked_gpus()
        if asked is None:
            if self.gpus_total is not None:
                return None
            if here is None:
                return (0,) * len(self.job_nodes) if self.node_name else None
            return (here,) * len(self.job_nodes)
        outside = self.step_id is None  # in a step, gpus_on_node may be the step's
        return None if outside and here not in (None, asked[self._place]) else asked

    @property
    def gpus_here(self) -> int | None:
        """GPUs on this node as slurmd, which grants them, has written them down; None where it did not."""
        return self.gpus_on_node if self.gpus_on_node is not None else self.gpu_ids

    @property
    def _place(self) -> int:
        """Where this node is in `job_nodes`."""
        if self.node_name in self.job_nodes:
            return self.job_nodes.index(self.node_name)
        return self.node_id if self.step_id is None and self.node_id < len(self.job_nodes) else 0

    def _asked_gpus(self) -> tuple[int, ...] | None:
        """GPUs on each node by the options of the job; None where there are none, or a total that does not divide."""
        count = len(self.job_nodes)
        if self.gpus_per_node is not None:
            return (self.gpus_per_node,) * count
        if self.gpus_total is not None:
            even, rest = divmod(self.gpus_total, count)
            return None if rest else (even,) * count
        if self.gpus_per_task and self.step_id is None and self.tasks_per_node:
            return tuple(self.gpus_per_task * tasks for tasks in self.tasks_per_node)
        return None

    def gpus_are_known(self) -> bool:
        """False where `gpus` may have taken the other nodes for like this one, or a total for evenly dealt out."""
        return len(self.job_nodes) == 1 or any((self.gpus_per_node, self.gpus_per_task)) or not any(self.gpus() or ())

    @property
    def gpus_origin(self) -> str:
        """The variables that `gpus` is read from, for messages."""
        asked = {
            "gpus_per_node": self.gpus_per_node,
            "gpus_total": self.gpus_total,
            "gpus_per_task": self.gpus_per_task,
        }
        here = {"gpus_on_node": self.gpus_on_node, "gpu_ids": self.gpu_ids}
        fields = [name for name, count in asked.items() if count][:1] or [n for n, c in here.items() if c is not None][
            :1
        ]
        return " or ".join(TABLE[fields[0]].names) if fields else "SLURM_GPUS_ON_NODE, which is not set,"

    def topology(self, gpus: Sequence[int], origin: str = "") -> Topology:
        """The job's nodes with so many GPUs; where there are none at all, 0 slots and the accelerator "cpu".

        `origin`: who told their number.
        """
        cpus = self.cpus_per_node or (0,) * len(gpus)
        nodes = tuple(Node(*row) for row in zip(self.job_nodes, gpus, cpus, strict=True))
        return Topology(nodes, GPU if any(gpus) else CPU, origin)


def read_slurm(environ: Mapping[str, str]) -> SlurmEnvironment | None:
    """The Slurm environment in `environ`; None outside a job.

    Raises PlacementError naming the variable that does not parse or contradicts another.
    """
    if not any(environ.get(name) for name in TABLE["job_id"].names):
        return None
    values = {name: _read(environ, variable) for name, variable in TABLE.items()}
    step = {name: _read(environ, variable) for name, variable in _SHAPE_TABLE.items()}
    if not values["job_nodes"]:
        raise PlacementError(
            f"SLURM_JOB_ID is {values['job_id']}, but SLURM_JOB_NODELIST is not set: unset SLURM_JOB_ID to run outside "
            "Slurm, or start from the batch script, salloc or srun"
        )
    if step["het_size"] > 1:
        raise PlacementError(
            f"this is a heterogeneous job of {step['het_size']} components (SLURM_HET_SIZE), and roles can only be "
            "placed on the nodes of one job: submit one job with --nodes and --gpus-per-node"
        )
    values["step_id"], values["step_nodes"] = step["step_id"], ()
    if step["step_id"] is not None:
        values["step_nodes"], values["tasks_per_node"] = step["step_nodes"], step["step_tasks_per_node"]
    _check_counts(values)
    return SlurmEnvironment(**values)


def _read(environ: Mapping[str, str], variable: Variable) -> Any:
    for name in variable.names:
        text = environ.get(name, "").strip()
        if text:
            try:
                return variable.parse(text)
            except (ValueError, PlacementError) as error:
                raise PlacementError(f"the environment variable {name}={text!r} does not parse: {error}") from error
    return variable.default


def _check_counts(values: dict[str, Any]) -> None:
    nodes = len(values["job_nodes"])
    if values["step_id"] is None and values["num_nodes"] not in (None, nodes):
        raise PlacementError(
            f"SLURM_JOB_NUM_NODES is {values['num_nodes']}, but SLURM_JOB_NODELIST names {nodes} nodes: one of them "
            "was changed by hand or by a container"
        )
    for field, count in (("cpus_per_node", nodes), ("tasks_per_node", len(values["step_nodes"]) or nodes)):
        if values[field]:
            try:
                values[field] = per_node(values[field], count)
            except ValueError as error:
                raise PlacementError(f"{' or '.join(TABLE[field].names)}: {error}") from error
