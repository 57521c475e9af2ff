"""Find what a run can use: nodes and slots, whether its GPUs have enough memory, Slurm's partitions.

A slot is a GPU; without GPUs it is a process.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from slurm_rlhf.cluster.gpu_query import local_gpus, local_kinds
from slurm_rlhf.cluster.slurm_environment import SlurmEnvironment, parse_gpus, read_slurm
from slurm_rlhf.cluster.slurm_job import ask_scontrol, command
from slurm_rlhf.config.model_directory import check_tensor_parallel
from slurm_rlhf.config.roles import ACTOR, colocations, has_engines
from slurm_rlhf.config.schema import Config
from slurm_rlhf.config.schema_jobs import STAGES
from slurm_rlhf.errors import ModelError, PlacementError, RunError
from slurm_rlhf.placement.gpus import TELL, GpuSize, found_size, size_by_keys
from slurm_rlhf.placement.memory import Account, Models, headless, least_recomputed, of_stage, read_models
from slurm_rlhf.placement.rank_map import RankMap, place, process_slots
from slurm_rlhf.placement.topology import CPU, GPU, Node, Topology, role_sizes


def local_topology(config: Config, environ: Mapping[str, str] = os.environ) -> Topology:
    """Describe this machine: with its GPUs if it has any, else with as many process slots as the roles need.

    Raises PlacementError if roles ask for several nodes, or for more GPUs than there are.
    """
    roles = role_sizes(config)
    several = [size for size in roles if size.num_nodes > 1]
    if several:
        keys = ", ".join(f"{size.key('num_nodes')} = {size.num_nodes}" for size in several)
        most = max(size.num_nodes for size in several)
        raise PlacementError(
            f"{keys}, but this is not a Slurm allocation and there is only this machine: set "
            f"{' and '.join(size.key('num_nodes') for size in several)} to 1, or submit with sbatch --nodes={most}"
        )
    topology, together = _this_machine(environ), colocations(config)
    if topology.accelerator == CPU:
        return process_slots(topology, roles, together)
    try:
        place(topology, roles, together)
    except PlacementError as error:
        raise PlacementError(
            f"{error}\n  or hide the GPUs and run on CPUs: CUDA_VISIBLE_DEVICES= slurm-rlhf ..."
        ) from error
    return topology


def node_name(environ: Mapping[str, str] = os.environ) -> str:
    """Return Slurm's name of this node, or the host name without its domain."""
    return environ.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0]


def current_topology(config: Config, environ: Mapping[str, str] = os.environ, nodes: Sequence[str] = ()) -> Topology:
    """Return nodes and slots for a run with `config` here. Without GPUs slots are processes.

    `nodes`: use only these nodes of the allocation; empty: all. Raises PlacementError if the environment contradicts
    itself, or does not have what `config` asks for.
    """
    slurm, kept = read_slurm(environ), config.reward.workers_num_nodes
    if slurm is None:
        return local_topology(config, environ).keep_for_workers(kept)
    topology = slurm.topology(_gpus(slurm)).keep_for_workers(kept)
    if nodes:
        topology = replace(topology, nodes=tuple(node for node in topology.nodes if node.name in nodes))
    if topology.accelerator == GPU:
        return topology
    return process_slots(topology, role_sizes(config), colocations(config))


def nodes_here(environ: Mapping[str, str]) -> Topology:
    """Return all nodes and GPUs that a process with `environ` may use: of its allocation, or of this machine.

    Without GPUs the topology has 0 slots. Raises PlacementError if the environment contradicts itself.
    """
    slurm = read_slurm(environ)
    if slurm is not None:
        return slurm.topology(_gpus(slurm))
    return _this_machine(environ)


def _this_machine(environ: Mapping[str, str]) -> Topology:
    gpus = local_gpus(environ)
    name, cpus = node_name(environ), len(os.sched_getaffinity(0))
    return Topology((Node(name, len(gpus), cpus, gpus),), GPU if gpus else CPU)


def _gpus(slurm: SlurmEnvironment) -> tuple[int, ...]:
    """Return the number of GPUs on each node: from the environment, from Slurm, or as on this node if it is silent."""
    if (gpus := slurm.gpus()) is not None:
        return gpus
    try:
        return ask_scontrol(slurm.job_id, slurm.job_nodes)
    except PlacementError:  # for example, a container without scontrol
        count, here = len(slurm.job_nodes), slurm.gpus_on_node
        if here is None or slurm.gpus_total not in (None, here * count):
            raise
        return (here,) * count


@dataclass(frozen=True, slots=True)
class Memory:
    """Hold the memory estimate; if there is none, `unknown` says why."""

    config: Config  # with the keys that depend on memory filled in
    size: GpuSize
    unknown: str = ""
    account: Account | None = None
    models: Models | None = None
    chosen: bool = False  # train.gradient_checkpointing is auto, and `config` has the value that was chosen for it


def memory_of(config: Config, found: GpuSize | None, command: str = "train") -> Memory:
    """Estimate the memory of a run, or a stage, on the GPUs that its configuration names, else on those `found`.

    Raises ConfigError for an unknown kind of GPU, and for a tensor-parallel size that does not divide the model.
    """
    samples = command not in STAGES
    config = config if samples else of_stage(config, command)
    size = size_by_keys(config.train.gpu, config.train.gpu_memory_gb) or found
    if size is None:
        return Memory(config, GpuSize(0), f"there are no GPUs here; to estimate it for a machine with GPUs, add {TELL}")
    if not size.memory:
        return Memory(config, size, "; ".join(size.notes))
    try:
        models = read_models(config)
    except ModelError as error:
        return Memory(config, size, str(error))
    if command == "rm":
        models = {ACTOR: headless(models[ACTOR])}
    actor = config.actor.model_name_or_path
    if has_engines(config):
        check_tensor_parallel("actor.model_name_or_path", actor, config.vllm.tensor_parallel_size)
    settled, found_account = least_recomputed(config, models, size.memory, samples)
    return Memory(settled, size, "", found_account, models, settled is not config)


def memory_on(config: Config, ranks: RankMap, command: str = "train") -> Memory:
    """Estimate as `memory_of`, on the GPUs of this machine or its allocation if the ranks use GPUs.

    Blocks for up to a minute if no program answers.
    """
    on_gpus = ranks.topology.accelerator == GPU
    return memory_of(config, _found() if on_gpus else None, command)


def fits_gpus(config: Config) -> bool:
    """Tell whether a run may fit the GPUs of this machine or its allocation; False if it is known to be too large.

    The first call blocks for up to a minute if no program answers.
    """
    found = memory_of(config, _found_once()).account
    return found is None or found.fits()


def _found() -> GpuSize:
    return found_size(local_kinds(os.environ))


_found_once = cache(_found)
"""Found once per process: nodes keep their GPUs."""


_FORMAT = "%P|%D|%G|%l|%c|%a"


@dataclass(frozen=True, slots=True)
class Partition:
    """Describe nodes of one kind in a partition."""

    name: str
    default: bool
    nodes: int
    gpus: int  # GPUs of a node
    time: str  # in Slurm's notation: 1-00:00:00, infinite
    cpus: int  # CPUs of a node
    up: bool

    def describe(self) -> str:
        """Describe the partition in a line, for a user who chooses one."""
        gpus = f"{self.gpus} GPUs" if self.gpus else "no GPUs"
        mark = " (default)" if self.default else ""
        return f"{self.name}{mark}: {self.nodes} nodes of {gpus} and {self.cpus} CPUs, at most {self.time}"


def parse_partitions(text: str) -> list[Partition]:
    """Parse the output of `sinfo --noheader --format=...`; skip lines of another form."""
    found = []
    for line in text.splitlines():
        fields = [field.strip() for field in line.split("|")]
        if len(fields) != 6 or not fields[1].isdigit():
            continue
        name, nodes, gres, time, cpus, state = fields
        gpus = 0 if gres.startswith("(") else parse_gpus(gres)  # (null)
        count = cpus.rstrip("+")
        number = int(count) if count.isdigit() else 0
        found.append(Partition(name.rstrip("*"), name.endswith("*"), int(nodes), gpus, time, number, state == "up"))
    return found


def ask_partitions() -> list[Partition]:
    """Ask sinfo; empty if there is no Slurm. Raises RunError if slurmctld does not answer."""
    if shutil.which("sinfo") is None:
        return []
    done = command(["sinfo", "--noheader", f"--format={_FORMAT}"])
    if done.returncode:
        raise RunError(f"sinfo failed: {done.stderr.strip()}")
    return [partition for partition in parse_partitions(done.stdout) if partition.up]


def best(partitions: list[Partition]) -> Partition | None:
    """Choose the partition to propose: most GPUs per node, then the default one, then most nodes."""
    return max(partitions, key=lambda each: (each.gpus, each.default, each.nodes), default=None)
