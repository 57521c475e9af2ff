"""Look at the nodes of an MPI start: the first process of each starts the agent, and all say what GPUs they see."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from slurm_rlhf.cli.preflight import QUICK, local_question
from slurm_rlhf.cluster.network import address_towards
from slurm_rlhf.cluster.resources import node_name
from slurm_rlhf.config.schema import Config
from slurm_rlhf.launch.accelerators import seen_by_processes
from slurm_rlhf.launch.child_process import bound_to_parent
from slurm_rlhf.launch.mpi.assignment import Process
from slurm_rlhf.launch.mpi.communicator import Communicator
from slurm_rlhf.launch.probe import equipment
from slurm_rlhf.placement.rank_map import RankMap
from slurm_rlhf.placement.topology import GPU
from slurm_rlhf.polling import wait_until
from slurm_rlhf.preflight.examination import Examination
from slurm_rlhf.preflight.orders import Orders
from slurm_rlhf.preflight.report import Report
from slurm_rlhf.preflight.starters import AGENT

_POLL_S = 0.1
_LATE_S = 30.0


def lead(
    world: Communicator, config: Config, ranks: RankMap, processes: Sequence[Process], full: bool = False
) -> Report:
    """Examine the nodes from rank 0. The others are in `follow`."""
    gpus = ranks.topology.accelerator == GPU
    world.broadcast({"equipment": gpus})
    wanted, seen = seen_by_processes(world.gather(_own_equipment(gpus)), gpus, config.ds.attn_implementation)
    nodes = tuple(dict.fromkeys(process.node for process in processes))
    elsewhere = next((node for node in nodes if node != node_name()), None)
    asked = local_question(config, ranks, "start it with a GPU for each process")
    asked = replace(
        asked,
        nodes=nodes,
        here=node_name(),
        address=address_towards(elsewhere) if elsewhere else "127.0.0.1",
        needs=replace(asked.needs, wanted=wanted),
        equipment=seen,
        thorough=full,
        measure=full or (config.preflight != QUICK and len(nodes) > 1),
    )
    first = {node: next(rank for rank, each in enumerate(processes) if each.node == node) for node in nodes}
    return Examination(asked, MpiStarter(world, first)).run().report


def follow(world: Communicator) -> Any:
    """Take part as any rank but 0, as often as rank 0 wants; return its first message about something else."""
    wait_s = _LATE_S
    while (message := world.broadcast(timeout_s=wait_s + _LATE_S)) is not None:
        if "equipment" in message:
            world.gather(_own_equipment(message["equipment"]))
        elif "agents" in message:
            wait_s = message["limit_s"] + _LATE_S
            if world.rank in message["agents"]:
                world.send(0, {"printed": _agent(message["environment"])})
        else:
            break
    return message


def _own_equipment(gpus: bool) -> dict[str, Any]:
    return {"node": node_name(), **equipment(gpus)}


def _agent(environment: Mapping[str, str]) -> list[str]:
    """Run the agent of this node; return its output and its errors."""
    done = _start(environment)
    return list(done.communicate())


def _start(environment: Mapping[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        bound_to_parent([sys.executable, "-m", AGENT]),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


class MpiStarter:
    """Implement `preflight.starters.Starter` on rank 0; `first` maps a node to its first rank."""

    def __init__(self, world: Communicator, first: Mapping[str, int]) -> None:
        self._world = world
        self._agents = set(first.values())
        self._own: subprocess.Popen[str] | None = None
        self._printed: list[list[str]] = []
        self._limit_s = 0.0

    def start(self, orders: Orders) -> None:
        self._limit_s = orders.limit_s
        environment = orders.to_environment()
        self._world.broadcast({"agents": sorted(self._agents), "environment": environment, "limit_s": orders.limit_s})
        if self._world.rank in self._agents:
            self._own = _start(environment)

    def said(self) -> tuple[str, str]:
        self._hear()
        return "".join(out for out, _ in self._printed), "".join(err for _, err in self._printed)

    def over(self) -> bool:
        self._hear()
        return len(self._printed) == len(self._agents)

    def end(self) -> None:
        """Wait for the agents, which end with the desk: what a rank said later would be taken for a report."""
        wait_until(self.over, self._limit_s + _LATE_S, _POLL_S, _POLL_S)

    def _hear(self) -> None:
        if self._own is not None and self._own.poll() is not None:
            self._printed.append(list(self._own.communicate()))
            self._own = None
        while (message := self._world.receive()) is not None:
            self._printed.append(message["printed"])
