"""`python -m slurm_rlhf.cli.conductor ORDERS --channel=N`: the conductor as the child of MPI's rank 0."""

from __future__ import annotations

import json
import os
import socket
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slurm_rlhf.cli.main import guarded
from slurm_rlhf.cluster.resources import node_name
from slurm_rlhf.config.load import load_config
from slurm_rlhf.placement.rank_map import RankMap


@dataclass(frozen=True, slots=True)
class Orders:
    """What rank 0 has found out: the configuration's file and overrides, the rank map, this node's address."""

    file: str
    overrides: list[str]
    ranks: dict[str, Any]
    address: str

    def to_word(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_word(cls, word: str) -> Orders:
        return cls(**json.loads(word))


def conduct(orders: Orders, channel: int) -> int:
    """The run; its ranks are told through the socket `channel`. Raises as `conductor.run`."""
    from slurm_rlhf.controller import conductor
    from slurm_rlhf.launch.channel import Channel
    from slurm_rlhf.launch.mpi.launcher import MpiLauncher
    from slurm_rlhf.launch.requeue import continuation_of

    config = load_config(Path(orders.file), orders.overrides)
    ranks = RankMap.from_json(orders.ranks)
    launcher = MpiLauncher(Channel(socket.socket(fileno=channel)), ranks, orders.address)
    return conductor.run(
        config, ranks, launcher, node_name(), continuation_of(config.slurm, Path(config.run_dir), os.environ)
    )


def main() -> int:
    channel = int(sys.argv[2].partition("=")[2])
    return guarded(lambda: conduct(Orders.from_word(sys.argv[1]), channel))


if __name__ == "__main__":
    sys.exit(main())
