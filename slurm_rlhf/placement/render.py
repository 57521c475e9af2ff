"""Draw the rank map as text: a grid of nodes and slots."""

from __future__ import annotations

from slurm_rlhf.config.roles import ROLES
from slurm_rlhf.placement.rank_map import RankMap
from slurm_rlhf.placement.topology import GPU

_MAX_ROWS = 64


def draw(rank_map: RankMap, max_rows: int = _MAX_ROWS) -> str:
    """Draw one row per node, one column per slot, then a legend.

    A0 is rank 0 of the actor, E3.1 TP rank 1 of engine 3, A0+R0 two colocated ranks, a dot a free slot. With
    more than `max_rows` nodes the middle rows are left out.
    """
    nodes = rank_map.topology.nodes
    cells: dict[str, dict[int, str]] = {node.name: {} for node in nodes}
    for role, shares in rank_map.roles.items():
        letter = ROLES[role].letter if role in ROLES else f"{role}:"
        for share in shares:
            row = cells[share.node]
            for place, (gpu, rank) in enumerate(zip(share.gpus, share.ranks, strict=True)):
                text = f"{letter}{rank}"
                if share.engines:
                    engine, tp_rank = share.engines[place]
                    text = f"{letter}{engine}.{tp_rank}"
                row[gpu] = f"{row[gpu]}+{text}" if gpu in row else text
    unit = "gpu" if rank_map.topology.accelerator == GPU else "slot"
    width = max((node.gpus for node in nodes), default=0)
    table = [["node", *(f"{unit}{index}" for index in range(width))]]
    half = max_rows // 2
    for index, node in enumerate(nodes):
        if len(nodes) <= max_rows or index < half or index >= len(nodes) - half:
            table.append([node.name, *(cells[node.name].get(gpu, ".") for gpu in range(node.gpus))])
        elif index == half:
            table.append([f"... {len(nodes) - 2 * half} more nodes"])
    return "\n".join([*_aligned(table), "", *_legend(rank_map)])


def _aligned(table: list[list[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in table if column < len(row)) for column in range(len(table[0]))]
    return ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=False)).rstrip() for row in table]


def _legend(rank_map: RankMap) -> list[str]:
    lines = []
    engines = {role: [group for group in rank_map.tp_groups if group.role == role] for role in rank_map.roles}
    for role, shares in rank_map.roles.items():
        ranks = rank_map.world(role)
        text = f"{ROLES[role].letter if role in ROLES else role} {role}: {ranks} {'rank' if ranks == 1 else 'ranks'}"
        text += f" on {len(shares)} {'node' if len(shares) == 1 else 'nodes'}"
        if engines[role]:
            count = len(engines[role])
            text += f", {count} {'engine' if count == 1 else 'engines'} of TP {len(engines[role][0].gpus)}"
        lines.append(text)
    used = len({(share.node, gpu) for shares in rank_map.roles.values() for share in shares for gpu in share.gpus})
    unit = "GPUs" if rank_map.topology.accelerator == GPU else "process slots"
    lines.append(f"{used} of {rank_map.topology.slots} {unit} used")
    return lines
