"""What one role's step is to do, as a file that the shim on each of its nodes reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from slurm_rlhf.atomic_write import write_atomically
from slurm_rlhf.errors import PlacementError
from slurm_rlhf.launch.torchrun import Meeting, TorchrunPlan, command
from slurm_rlhf.placement.rank_map_file import NodeShare, RankMap

WORKER_MODULE = "slurm_rlhf.workers.main"


@dataclass(frozen=True, slots=True)
class StepOrder:
    """`role` of the run in `run_dir`; `run_id` names this start of it, on every node the same.

    `port` is where its torchruns meet; 0: each is alone on its node, so that none ends with another's node.
    `environment` maps a node to the variables of the role's processes there.
    """

    role: str
    run_dir: str
    run_id: str
    arguments: list[str]
    environment: Mapping[str, Mapping[str, str]]
    port: int = 0

    def write(self, path: Path) -> None:
        """Write it as JSON, at once whole or not at all."""
        write_atomically(path, json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> StepOrder:
        return cls(**json.loads(path.read_text(encoding="utf-8")))


def share_on(ranks: RankMap, role: str, node: str) -> NodeShare:
    """The role's part of `node`. Raises PlacementError when the rank map gives it none there."""
    for share in ranks.roles[role]:
        if share.node == node:
            return share
    places = ", ".join(share.node for share in ranks.roles[role])
    raise PlacementError(f"{role} was started on {node}, but the rank map has it on {places}")


def torchrun_command(order: StepOrder, ranks: RankMap, node: str, log_dir: str) -> list[str]:
    """The torchrun of `order` on `node`; its workers get the numbers that the rank map gives them."""
    share = share_on(ranks, order.role, node)
    shares = ranks.roles[order.role]
    meeting = Meeting(shares[0].node, order.port, len(shares), shares.index(share)) if order.port else None
    plan = TorchrunPlan(order.role, len(share.ranks), order.run_id, log_dir, meeting)
    numbers = [f"--first_rank={share.ranks[0]}", f"--world={ranks.world(order.role)}"]
    return command(plan, WORKER_MODULE, [*order.arguments, *numbers])
