"""Become the torchrun of a role on one node: `python -m slurm_rlhf.launch.node SPEC.json`, run by the role's step."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from slurm_rlhf.cluster.network import address_towards, interface_of
from slurm_rlhf.cluster.processes import die_with_parent
from slurm_rlhf.cluster.resources import node_name
from slurm_rlhf.errors import PlacementError
from slurm_rlhf.launch.node_environment import INTERFACES, node_environment, take_cache, visible_gpus
from slurm_rlhf.launch.step_spec import StepSpec, share_on, torchrun_command
from slurm_rlhf.placement.rank_map import RankMap

RANK_MAP = "rank_map.json"
"""In the run directory."""

IGNORED = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)
"""Signals to a step reach every process in it, torchrun included; only the conductor reacts to them."""


def main() -> None:
    die_with_parent(os.getppid())
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)  # inherited by torchrun and its workers
    try:
        command, environment = prepare(Path(sys.argv[1]), os.environ)
    except PlacementError as error:
        sys.exit(f"error: {error}")
    sys.stdout.flush()
    os.execvpe(command[0], command, environment)


def prepare(file: Path, environ: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Return the torchrun of this node and its environment. Makes the node's cache directory, prints its choices."""
    spec = StepSpec.read(file)
    run_dir = Path(spec.run_dir)
    ranks = RankMap.from_json(json.loads((run_dir / RANK_MAP).read_text(encoding="utf-8")))
    node = node_name(environ)
    share = share_on(ranks, spec.role, node)
    gpus = visible_gpus(ranks.topology, node, share.gpus, environ)
    interface = interface_to_others(ranks, node)
    cache = take_cache(f"{spec.run_id}.{node}.{spec.role}")
    environment = node_environment(
        environ, spec.role, run_dir / "logs", cache, {**spec.environment[node], **gpus}, interface
    )
    print(f"{node}: ranks {share.ranks[0]} to {share.ranks[-1]} of {spec.role}, slots {_numbers(share.gpus)}")
    chosen = ", ".join(f"{name}={environment.get(name, '')}" for name in INTERFACES)
    print(f"{node}: {chosen} (interface to the other nodes: {interface or 'unknown'}; export these to choose others)")
    command = torchrun_command(spec, ranks, node, str(cache / "torchrun"))
    if spec.port:
        print(f"{node}: the torchruns of {spec.role} meet at {ranks.roles[spec.role][0].node}:{spec.port}")
    # torchrun would end its workers at SIGTERM, and with them what they have not saved.
    return [*command[:3], "--signals-to-handle=SIGINT", *command[3:]], environment


def interface_to_others(ranks: RankMap, node: str) -> str:
    """Return the interface towards another node of the run; loopback if there is no other node."""
    others = (share.node for shares in ranks.roles.values() for share in shares if share.node != node)
    other = next(others, None)
    return interface_of(address_towards(other)) if other else "lo"


def _numbers(numbers: tuple[int, ...]) -> str:
    return ",".join(map(str, numbers))


if __name__ == "__main__":
    main()
