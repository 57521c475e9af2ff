"""Texts that are committed whole, and the rank map that they are made for."""

from __future__ import annotations

import sys
from pathlib import Path

from slurm_rlhf.placement.rank_map import RankMap, place
from slurm_rlhf.placement.topology import Node, RoleSize, Topology

GOLDEN = Path(__file__).parents[1] / "nodes" / "golden"
LOGS = Path("/runs/a/logs")


def ranks(gpus: int = 8) -> RankMap:
    """The seed's case: 6 actor GPUs and 2 engines on each of two nodes, and a critic on a third."""
    topology = Topology(tuple(Node(f"gpu{index}", gpus, 64) for index in (1, 2, 3)))
    sizes = [RoleSize("actor", 2, 6), RoleSize("critic", 1, 4), RoleSize("rollout", 2, engines=4)]
    return place(topology, sizes)


def lines(words: list[str]) -> str:
    return "\n".join("PYTHON" if word == sys.executable else word for word in words) + "\n"


def assert_golden(name: str, text: str) -> None:
    """`text` is what tests/golden/`name` holds."""
    assert text == (GOLDEN / name).read_text(encoding="utf-8")
