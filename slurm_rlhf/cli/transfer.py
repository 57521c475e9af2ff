"""What the weight transfer of a configuration will cost, before anything has run."""

from __future__ import annotations

from typing import Any

from slurm_rlhf.config.buckets import bucket_mb
from slurm_rlhf.config.model_parameters import stored_parameters
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import ModelError
from slurm_rlhf.placement.rank_plan import RankMap
from slurm_rlhf.placement.topology import GPU
from slurm_rlhf.weight_sync.cost import Account, account
from slurm_rlhf.weight_sync.layout import Layout
from slurm_rlhf.weight_sync.plan import SyncPlan, make_plan

GIGABIT = 125_000_000  # bytes
NETWORK_GBITS, INSIDE_GBITS = 100.0, 800.0


def transfer_plan(config: Config, ranks: RankMap) -> SyncPlan | None:
    """The plan of the actor's model over `ranks`; None where the model's files do not say their shapes."""
    try:
        stored = stored_parameters(config.actor.model_name_or_path)
    except ModelError:
        return None
    described = [[name, shape, config.ds.param_dtype] for name, shape in stored]
    nodes = {role: [share.node for share in shares for _ in share.ranks] for role, shares in ranks.roles.items()}
    layout = Layout(tuple(nodes["actor"]), tuple(nodes["rollout"]), config.ds.zero_stage)
    on_gpus = ranks.topology.accelerator == GPU and config.sync.backend in ("auto", "nccl", "ipc")
    return make_plan(described, bucket_mb(config.sync.bucket_mb, on_gpus) << 20, layout)


def transfer_json(plan: SyncPlan, network_gbits: float, inside_gbits: float) -> dict[str, Any]:
    """JSON-ready bytes per rank and link of one update, and predicted seconds."""
    found = account(plan)
    actors = len(plan.layout.actors)
    return {
        "bytes": found.payload,
        "buckets": len(plan.buckets),
        "seconds": _seconds(found, network_gbits, inside_gbits),
        "network_gbits": network_gbits,
        "inside_gbits": inside_gbits,
        "actor_sent": {str(rank): round(found.sent.get(rank, 0)) for rank in range(actors)},
        "engine_sent": {
            str(rank - actors): round(found.sent.get(rank, 0)) for rank in range(actors, plan.layout.world)
        },
        "engine_received": {
            str(rank - actors): round(found.received[rank]) for rank in range(actors, plan.layout.world)
        },
        "links": {
            node: {"out": round(found.out.get(node, 0)), "into": round(found.into.get(node, 0))}
            for node in _nodes(plan)
        },
    }


def draw_transfer(plan: SyncPlan, network_gbits: float, inside_gbits: float) -> str:
    """The same for a terminal."""
    found = account(plan)
    actors = range(len(plan.layout.actors))
    engines = range(len(actors), plan.layout.world)
    lines = [
        f"weight transfer: {_size(found.payload)} in {len(plan.buckets)} buckets, about "
        f"{_seconds(found, network_gbits, inside_gbits):.3g} s at {network_gbits:g} Gbit/s between nodes and "
        f"{inside_gbits:g} Gbit/s inside",
        f"  an actor rank sends {_range([found.sent.get(rank, 0) for rank in actors])}",
        f"  an engine rank receives {_range([found.received[rank] for rank in engines])} "
        f"and hands on {_range([found.sent.get(rank, 0) for rank in engines])}",
    ]
    for node in _nodes(plan)[:8]:
        lines.append(f"  {node}: {_size(found.out.get(node, 0))} out, {_size(found.into.get(node, 0))} in")
    rest = len(_nodes(plan)) - 8
    return "\n".join([*lines, f"  and {rest} more nodes"] if rest > 0 else lines)


def _seconds(found: Account, network_gbits: float, inside_gbits: float) -> float:
    return found.seconds(network_gbits * GIGABIT, inside_gbits * GIGABIT)


def _nodes(plan: SyncPlan) -> list[str]:
    return list(dict.fromkeys(plan.layout.actors + plan.layout.engines))


def _range(counts: list[float]) -> str:
    low, high = min(counts), max(counts)
    return _size(low) if _size(low) == _size(high) else f"{_size(low)} to {_size(high)}"


def _size(nbytes: float) -> str:
    for unit in ("B", "kB", "MB"):
        if nbytes < 1000:
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.4g} GB"
