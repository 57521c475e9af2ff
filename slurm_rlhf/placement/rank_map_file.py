"""Which rank of which role runs on which slot of which node."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from slurm_rlhf.placement.topology import GPU, Node, Topology


@dataclass(frozen=True, slots=True)
class NodeShare:
    """One role's part of one node.

    `gpus[i]` is the slot of rank `ranks[i]`; for a role made of engines `engines[i]` is (engine index, TP rank),
    for the others `engines` is empty.
    """

    node: str
    gpus: tuple[int, ...]
    ranks: tuple[int, ...]
    engines: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class TpGroup:
    """One engine: neighbouring slots of one node, `gpus[i]` for TP rank i, which is rank `ranks[i]` of its role."""

    role: str
    engine: int
    node: str
    gpus: tuple[int, ...]
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RankMap:
    """The placement: `roles` maps each role to its shares, in node order. Ranks count up over nodes, then slots."""

    topology: Topology
    roles: dict[str, list[NodeShare]]

    def world(self, role: str) -> int:
        """Ranks of `role`; KeyError if it does not run."""
        return sum(len(share.ranks) for share in self.roles[role])

    @property
    def worlds(self) -> dict[str, int]:
        """Role -> ranks."""
        return {role: self.world(role) for role in self.roles}

    @property
    def tp_groups(self) -> list[TpGroup]:
        """All engines, by role and index."""
        groups = []
        for role, shares in self.roles.items():
            for share in shares:
                start = 0
                while start < len(share.engines):
                    engine = share.engines[start][0]
                    end = start
                    while end < len(share.engines) and share.engines[end][0] == engine:
                        end += 1
                    groups.append(TpGroup(role, engine, share.node, share.gpus[start:end], share.ranks[start:end]))
                    start = end
        return groups

    def to_json(self) -> dict[str, Any]:
        """JSON-ready `accelerator`, `nodes`, `roles` (role -> [{node, gpus, ranks, engines}]), `tp_groups`, `world`."""
        return {
            "accelerator": self.topology.accelerator,
            "nodes": [_node_json(node) for node in self.topology.nodes],
            "roles": {role: [_share_json(share) for share in shares] for role, shares in self.roles.items()},
            "tp_groups": [
                {"role": g.role, "engine": g.engine, "node": g.node, "gpus": list(g.gpus), "ranks": list(g.ranks)}
                for g in self.tp_groups
            ],
            "world": self.worlds,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> RankMap:
        """What `to_json` wrote."""
        nodes = tuple(Node(n["name"], n["gpus"], n.get("cpus", 0), tuple(n.get("devices", ()))) for n in data["nodes"])
        roles = {
            role: [
                NodeShare(
                    share["node"],
                    tuple(share["gpus"]),
                    tuple(share["ranks"]),
                    tuple((engine, rank) for engine, rank in share.get("engines", ())),
                )
                for share in shares
            ]
            for role, shares in data["roles"].items()
        }
        return cls(Topology(nodes, data.get("accelerator", GPU)), roles)


def _node_json(node: Node) -> dict[str, Any]:
    return {key: value for key, value in asdict(node).items() if value or key in ("name", "gpus")}


def _share_json(share: NodeShare) -> dict[str, Any]:
    data: dict[str, Any] = {"node": share.node, "gpus": list(share.gpus), "ranks": list(share.ranks)}
    if share.engines:
        data["engines"] = [list(slot) for slot in share.engines]
    return data
