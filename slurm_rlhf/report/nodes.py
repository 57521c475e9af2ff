"""The rank map as a picture: which rank of which role is on which accelerator of which node, how fast, how full."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slurm_rlhf.report.curves import latest, rounded

MOST = 512
"""Nodes on the page."""


def nodes(layout: dict[str, Any], rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return {"unit", "nodes": [{"name", "slots": [[rank, ...], ...]}], "left_out"}.

    A rank is {"role", "rank", "engine", "tokens_per_s", "used", "total"}; what is not known is None. Sizes in bytes.
    """
    ranks = layout.get("ranks", {})
    found = [{"name": node["name"], "slots": [[] for _ in range(node["gpus"])]} for node in ranks.get("nodes", [])]
    by_name = {node["name"]: node for node in found}
    memory = layout.get("memory", {})
    for role, shares in ranks.get("roles", {}).items():
        world = sum(len(share["ranks"]) for share in shares)
        for share in shares:
            engines = share.get("engines") or [None] * len(share["ranks"])
            for slot, rank, engine in zip(share["gpus"], share["ranks"], engines, strict=True):
                index, rank_of_engine = engine or (None, 0)
                known = memory.get(role, {}).get(str(rank), {})
                by_name[share["node"]]["slots"][slot].append(
                    {
                        **{"role": role, "rank": rank, "engine": index},
                        # The rate is that of an engine as a whole: its first rank shows it.
                        "tokens_per_s": speed(rows, role, world, index) if not rank_of_engine else None,
                        **{"used": known.get("used"), "total": known.get("total")},
                    }
                )
    unit = "GPU" if ranks.get("accelerator") == "gpu" else "slot"
    return {"unit": unit, "nodes": found[:MOST], "left_out": max(0, len(found) - MOST)}


def speed(rows: Sequence[dict[str, Any]], role: str, world: int, engine: int | None) -> float | None:
    """Return response tokens per second: of an engine while it had requests, of a trainer's rank during updates."""
    if engine is not None:
        return latest(rows, f"perf/engine/{engine}/tokens_per_s")
    if role not in ("actor", "critic"):
        return None
    tokens, seconds = latest(rows, "response_tokens"), latest(rows, "time/update")
    return rounded(tokens / seconds / world) if tokens and seconds else None


def weight_sync(layout: dict[str, Any], rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what a weight update moves: bytes, seconds, bytes per second, share of the link; None: not known."""
    nbytes, seconds = latest(rows, "perf/sync_bytes"), latest(rows, "time/sync_transfer")
    return {
        **layout.get("weight_transfer", {}),
        **{"bytes": nbytes, "seconds": seconds},
        "rate": rounded(nbytes / seconds) if nbytes and seconds else None,
        "link_share": latest(rows, "perf/sync_link_share"),
    }
