"""Rules of `train.colocate_all`: one shape for all roles, and what cannot be had with it."""

from __future__ import annotations

from collections.abc import Iterator

from slurm_rlhf.config.roles import running_roles
from slurm_rlhf.config.schema import Config


def colocated(config: Config) -> Iterator[str]:
    """One sentence per broken rule."""
    if not config.train.colocate_all:
        if config.ds.enable_sleep:
            yield (
                "ds.enable_sleep makes room for engines on the same accelerators: it needs train.colocate_all = true"
            )
        return
    yield from _trainers(config)
    yield from _engines(config)
    if config.vllm.sync_mode == "inflight":
        yield (
            "train.colocate_all and vllm.sync_mode = inflight exclude each other: engines sleep while the actor "
            "trains, so no response is in flight when weights change. Use vllm.sync_mode = drain"
        )
    if config.sync.backend == "nccl":
        yield (
            "train.colocate_all puts actor and engines on the same GPUs, and NCCL refuses two ranks on one GPU: "
            "use sync.backend = auto, ipc, gloo or disk"
        )
    if config.ds.enable_sleep and config.ds.zero_stage < 2:
        yield f"ds.enable_sleep needs ds.zero_stage 2 or 3, got {config.ds.zero_stage}: raise it, or switch it off"


def _trainers(config: Config) -> Iterator[str]:
    """Every other role that runs on accelerators is as large as the actor."""
    actor = config.actor
    for role in running_roles(config):
        group, name = role.settings(config), role.group
        if role.kind == "engine":
            continue
        if (group.num_nodes, group.num_gpus_per_node) != (actor.num_nodes, actor.num_gpus_per_node):
            yield (
                f"train.colocate_all needs roles of one size, and {name} has {group.num_nodes} x "
                f"{group.num_gpus_per_node} slots, the actor {actor.num_nodes} x {actor.num_gpus_per_node}: set "
                f"{name}.num_nodes = {actor.num_nodes} and {name}.num_gpus_per_node = {actor.num_gpus_per_node}"
            )


def _engines(config: Config) -> Iterator[str]:
    """Engines cover the actor's slots, each inside one node."""
    actor, vllm = config.actor, config.vllm
    slots, width = actor.num_nodes * actor.num_gpus_per_node, vllm.tensor_parallel_size
    if vllm.num_engines * width != slots or actor.num_gpus_per_node % width:
        fits = " or ".join(
            f"{slots // tp} x {tp}" for tp in range(1, actor.num_gpus_per_node + 1) if not actor.num_gpus_per_node % tp
        )
        yield (
            f"train.colocate_all needs engines on all of the actor's slots, actor.num_nodes * actor.num_gpus_per_node "
            f"= {actor.num_nodes} * {actor.num_gpus_per_node} = {slots}, and vllm.num_engines * "
            f"vllm.tensor_parallel_size is {vllm.num_engines} * {width} = {vllm.num_engines * width}; engines inside a "
            f"node: use {fits}"
        )
    if vllm.num_nodes not in (0, actor.num_nodes):
        yield (
            f"train.colocate_all puts engines on the actor's {actor.num_nodes} nodes, and vllm.num_nodes is "
            f"{vllm.num_nodes}: set it to 0 or {actor.num_nodes}"
        )
