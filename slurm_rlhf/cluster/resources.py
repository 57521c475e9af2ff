"""The topology this process can use: the Slurm allocation it is in, or this machine."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping, Sequence

from slurm_rlhf.cluster.environment import SlurmEnvironment, read_slurm
from slurm_rlhf.cluster.local import local_topology, process_slots
from slurm_rlhf.cluster.scontrol_gpus import ask_scontrol
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import PlacementError
from slurm_rlhf.placement.rank_plan import role_sizes
from slurm_rlhf.placement.topology import CPU, Topology


def node_name(environ: Mapping[str, str] = os.environ) -> str:
    """Slurm's name of this node, or the host name without its domain."""
    return environ.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0]


def current_topology(
    config: Config, colocate: Sequence[frozenset[str]] = (), environ: Mapping[str, str] | None = None
) -> Topology:
    """Nodes and slots for a run with `config` here. An allocation without GPUs gets process slots.

    Raises PlacementError where the environment contradicts itself or does not hold what `config` asks for.
    """
    environ = os.environ if environ is None else environ
    slurm = read_slurm(environ)
    if slurm is None:
        return local_topology(config, colocate, environ)
    topology = slurm.topology(*_gpus(slurm))
    return process_slots(topology, role_sizes(config), colocate) if topology.accelerator == CPU else topology


def _gpus(slurm: SlurmEnvironment) -> tuple[tuple[int, ...], str]:
    """GPUs on each node, and who said so.

    Where the environment tells of one node alone, or contradicts itself, Slurm knows.
    """
    gpus = slurm.gpus()
    asked = f"scontrol show job --details {slurm.job_id}"
    if gpus is None:
        try:
            return ask_scontrol(slurm.job_id, slurm.job_nodes), asked
        except PlacementError:
            # Of this node slurmd's word is enough; of others it is a guess.
            if slurm.gpus_here is None or slurm.step_id is not None or len(slurm.job_nodes) > 1:
                raise
            return (slurm.gpus_here,), "SLURM_GPUS_ON_NODE"
    if not slurm.gpus_are_known():
        with contextlib.suppress(PlacementError):  # no scontrol in a container, say
            return ask_scontrol(slurm.job_id, slurm.job_nodes), asked
    return gpus, slurm.gpus_origin
