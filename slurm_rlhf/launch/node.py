"""`python -m slurm_rlhf.launch.node ORDER.json`: on each node of a role's step, become the role's torchrun there."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from slurm_rlhf.cluster.child_process import die_with_parent
from slurm_rlhf.cluster.network import address_towards, interface_of
from slurm_rlhf.cluster.resources import node_name
from slurm_rlhf.errors import PlacementError
from slurm_rlhf.launch.caches import take_cache
from slurm_rlhf.launch.gpu_visibility import visibility
from slurm_rlhf.launch.step_spec import StepOrder, share_on, torchrun_command
from slurm_rlhf.launch.variables import INTERFACES, node_environment
from slurm_rlhf.placement.rank_map_file import RankMap

RANK_MAP = "rank_map.json"
"""In the run directory."""

IGNORED = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)
"""Signals to a step reach every process in it, torchrun included. The conductor decides what they mean."""


def main() -> None:
    die_with_parent(os.getppid())
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)  # as every process does that comes of this one, until it says otherwise
    try:
        command, environment = prepare(Path(sys.argv[1]), os.environ)
    except PlacementError as error:
        sys.exit(f"error: {error}")
    sys.stdout.flush()
    os.execvpe(command[0], command, environment)


def prepare(file: Path, environ: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """The torchrun of this node and its environment. Takes the node's cache directory, prints what it chose."""
    order = StepOrder.read(file)
    run_dir = Path(order.run_dir)
    ranks = RankMap.from_json(json.loads((run_dir / RANK_MAP).read_text(encoding="utf-8")))
    node = node_name(environ)
    share = share_on(ranks, order.role, node)
    shown, hidden = visibility(ranks.topology, node, share.gpus, environ)
    interface = interface_to_others(ranks, node)
    cache = take_cache(f"{order.run_id}.{node}.{order.role}")
    environment = node_environment(
        environ, order.role, run_dir / "logs", cache, {**order.environment[node], **shown}, interface
    )
    for name in hidden:
        environment.pop(name, None)
    print(f"{node}: ranks {share.ranks[0]} to {share.ranks[-1]} of {order.role}, slots {_listed(share.gpus)}")
    chosen = ", ".join(f"{name}={environment.get(name, '')}" for name in INTERFACES)
    print(f"{node}: {chosen} (the way to the other nodes is {interface or 'not known'}; export them to choose another)")
    command = torchrun_command(order, ranks, node, str(cache / "torchrun"))
    if order.port:
        print(f"{node}: the torchruns of {order.role} meet at {ranks.roles[order.role][0].node}:{order.port}")
    # torchrun would end its workers at SIGTERM, and with them what they have not saved.
    return [*command[:3], "--signals-to-handle=SIGINT", *command[3:]], environment


def interface_to_others(ranks: RankMap, node: str) -> str:
    """The interface towards another node of the run; loopback where there is none."""
    others = (share.node for shares in ranks.roles.values() for share in shares if share.node != node)
    other = next(others, None)
    return interface_of(address_towards(other)) if other else "lo"


def _listed(numbers: tuple[int, ...]) -> str:
    return ",".join(map(str, numbers))


if __name__ == "__main__":
    main()
