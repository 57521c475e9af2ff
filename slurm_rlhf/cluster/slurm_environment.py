"""Read the environment variables of Slurm into one typed object.

In a step (`srun`) some variables describe the step, others the whole job. Variables that are not needed are not read,
so that a malformed one cannot stop a run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from typing import Any

from slurm_rlhf.cluster.slurm_notation import expand, expand_counts, parse_gpus, per_node
from slurm_rlhf.errors import PlacementError
from slurm_rlhf.placement.topology import CPU, GPU, Node, Topology

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

        They tell if each node was asked for as many as this one has: a job that is submitted inside another job
        inherits that job's request. In a step the number of this node may be the step's.
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
    if not values["job_nodes"]:
        raise PlacementError(
            f"SLURM_JOB_ID is {values['job_id']}, but SLURM_JOB_NODELIST is not set: unset SLURM_JOB_ID to run outside "
            "Slurm, or start from the batch script, salloc or srun"
        )
    if values["het_size"] > 1:
        raise PlacementError(
            f"this is a heterogeneous job of {values['het_size']} components (SLURM_HET_SIZE), and roles can only be "
            "placed on the nodes of one job: submit one job with --nodes and --gpus-per-node"
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
