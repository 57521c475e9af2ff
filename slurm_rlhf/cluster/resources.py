"""Find the nodes and slots that a run can use, in a Slurm allocation or here. Without GPUs a slot is a process."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace

from slurm_rlhf.cluster.gpu_query import local_gpus
from slurm_rlhf.cluster.slurm_environment import SlurmEnvironment, read_slurm
from slurm_rlhf.cluster.slurm_job import ask_scontrol
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import PlacementError
from slurm_rlhf.placement.rank_map import place, process_slots
from slurm_rlhf.placement.topology import CPU, GPU, Node, Topology, role_sizes


def local_topology(
    config: Config, colocate: Sequence[frozenset[str]] = (), environ: Mapping[str, str] | None = None
) -> Topology:
    """Describe this machine: with its GPUs if it has any, else with as many process slots as the roles need.

    Raises PlacementError if roles ask for several nodes, or for more GPUs than there are.
    """
    environ = os.environ if environ is None else environ
    roles = role_sizes(config)
    several = [size for size in roles if size.num_nodes > 1]
    if several:
        keys = ", ".join(f"{size.key('num_nodes')} = {size.num_nodes}" for size in several)
        most = max(size.num_nodes for size in several)
        raise PlacementError(
            f"{keys}, but this is not a Slurm allocation and there is only this machine: set "
            f"{' and '.join(size.key('num_nodes') for size in several)} to 1, or submit with sbatch --nodes={most}"
        )
    name = socket.gethostname().partition(".")[0]
    cpus = len(os.sched_getaffinity(0))
    gpus = local_gpus(environ)
    if not gpus:
        return process_slots(Topology((Node(name, 0, cpus),), CPU), roles, colocate)
    topology = Topology((Node(name, len(gpus), cpus, gpus),), GPU)
    try:
        place(topology, roles, colocate)
    except PlacementError as error:
        raise PlacementError(
            f"{error}\n  or hide the GPUs and run on CPUs: CUDA_VISIBLE_DEVICES= slurm-rlhf ..."
        ) from error
    return topology


def node_name(environ: Mapping[str, str] = os.environ) -> str:
    """Return the name that Slurm has for this node, or the host name without its domain."""
    return environ.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0]


def current_topology(
    config: Config,
    colocate: Sequence[frozenset[str]] = (),
    environ: Mapping[str, str] | None = None,
    nodes: Sequence[str] = (),
) -> Topology:
    """Return nodes and slots for a run with `config` here. An allocation without GPUs gets process slots.

    `nodes`: take only these of the allocation; empty: all.

    Raises PlacementError where the environment contradicts itself or does not hold what `config` asks for.
    """
    environ = os.environ if environ is None else environ
    slurm = read_slurm(environ)
    if slurm is None:
        return local_topology(config, colocate, environ)
    topology = slurm.topology(*_gpus(slurm))
    if nodes:
        topology = replace(topology, nodes=tuple(node for node in topology.nodes if node.name in nodes))
    return process_slots(topology, role_sizes(config), colocate) if topology.accelerator == CPU else topology


def nodes_here(environ: Mapping[str, str]) -> Topology:
    """Return all nodes and GPUs that a process with `environ` may use: those of its allocation, or of this machine.

    Without GPUs the topology has 0 slots. Raises PlacementError where the environment contradicts itself.
    """
    slurm = read_slurm(environ)
    if slurm is not None:
        return slurm.topology(*_gpus(slurm))
    gpus = local_gpus(environ)
    name, cpus = socket.gethostname().partition(".")[0], len(os.sched_getaffinity(0))
    return Topology((Node(name, len(gpus), cpus, gpus),), GPU if gpus else CPU)


def _gpus(slurm: SlurmEnvironment) -> tuple[tuple[int, ...], str]:
    """Return the GPUs on each node, and where the numbers come from.

    Slurm is asked where the environment describes only one node, or contradicts itself.
    """
    gpus = slurm.gpus()
    asked = f"scontrol show job --details {slurm.job_id}"
    if gpus is None:
        try:
            return ask_scontrol(slurm.job_id, slurm.job_nodes), asked
        except PlacementError:
            # For this node slurmd is right; for other nodes its number would be a guess.
            if slurm.gpus_here is None or slurm.step_id is not None or len(slurm.job_nodes) > 1:
                raise
            return (slurm.gpus_here,), "SLURM_GPUS_ON_NODE"
    if not slurm.gpus_are_known():
        with contextlib.suppress(PlacementError):  # no scontrol in a container, say
            return ask_scontrol(slurm.job_id, slurm.job_nodes), asked
    return gpus, slurm.gpus_origin
