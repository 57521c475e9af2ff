"""Run `slurm-rlhf plan`: show the rank map of a configuration, its memory, and what a weight transfer costs."""

from __future__ import annotations

import json
import math
import sys
from typing import Any

from slurm_rlhf.cli.main import Command, parse, take_options
from slurm_rlhf.cli.placement_report import (
    draw_layout,
    draw_memory,
    layout_on,
    layout_somewhere,
    memory_json,
    require_fit,
)
from slurm_rlhf.cluster.gpu_memory import memory_of, memory_on
from slurm_rlhf.cluster.slurm_notation import expand, gpus_of_nodes, slurm_order
from slurm_rlhf.config.check import check_colocation
from slurm_rlhf.config.load import load_config
from slurm_rlhf.config.model_directory import stored_parameters
from slurm_rlhf.config.roles import ROLES, has_engines
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import ConfigError, ModelError, shortened
from slurm_rlhf.placement.rank_map import RankMap, draw
from slurm_rlhf.placement.topology import GPU, numbered_names
from slurm_rlhf.weights.routes import cost_of
from slurm_rlhf.weights.transfer_plan import Layout, SyncPlan, make_plan

NETWORK_GBITS, INSIDE_GBITS = 100.0, 800.0
_GIGABIT = 125_000_000  # bytes
USAGE = (
    "usage: slurm-rlhf plan FILE.toml [FILE.toml ...] [--KEY=VALUE ...] [--json]\n"
    "                       [--gpus_per_node=GPUS (--nodes=N | --nodelist=LIST)]\n"
    "                       [--gpu=NAME | --gpu_memory_gb=GB] [--network_gbits=RATE] [--inside_gbits=RATE]"
)
FLAGS = {
    "json": "print one JSON object: accelerator, nodes, roles (role -> node, gpus, ranks), tp_groups, world, memory, "
    "transfer"
}
NODE_OPTIONS = {
    "nodes": "plan for this many nodes",
    "nodelist": "plan for these nodes, written as Slurm does: gpu[001-003,007]; they are put in the order that Slurm "
    "gives a job's nodes",
    "gpus_per_node": "GPUs of each of these nodes: 8; or of one after the other, in Slurm's order: 6,6,4,4,4; or by "
    "name: fat-[1-2]:6,r01c[01-03]:4",
}
GPU_OPTIONS = {
    "gpu": "kind of the GPUs, as train.gpu: h100, a100_40gb, h200, ...",
    "gpu_memory_gb": "memory of a GPU as it is sold, as train.gpu_memory_gb",
}
RATES = {
    "network_gbits": f"Gbit/s of a node's links in each direction, to predict the seconds [{NETWORK_GBITS:g}]",
    "inside_gbits": f"Gbit/s between the ranks of one node [{INSIDE_GBITS:g}]",
}


SIZES = ("num_nodes", "num_gpus_per_node")
KEYS = [f"{role.group}.{size}" for role in ROLES.values() if role.kind != "engine" for size in SIZES]
KEYS += ["rollout.engine", "vllm.num_engines", "vllm.tensor_parallel_size", "vllm.num_nodes"]
KEYS += ["algo.advantage.estimator", "train.plugins", "algo.kl.init_coef", "reward.model_name_or_path"]
KEYS += ["train.colocate_all", *filter(None, (role.colocation_key for role in ROLES.values()))]
KEYS += ["ds.zero_stage", "ds.param_dtype", "sync.bucket_mb"]
KEYS += ["train.gpu", "train.gpu_memory_gb", "train.max_tokens_per_gpu", "train.forward_max_tokens_per_gpu"]
KEYS += ["train.logprob_chunk_tokens", "actor.gradient_checkpointing_enable", "data.max_len", "ds.enable_sleep"]
KEYS += ["ref.zero_stage", "ref.offload", "vllm.gpu_memory_utilization", "vllm.max_num_seqs"]
KEYS += ["rollout.hf_max_num_seqs", "rollout.hf_gather", "rollout.max_new_tokens"]


def run(words: list[str]) -> int:
    """Print the plan. Raises ConfigError, and PlacementError if the roles or their memory do not fit."""
    options, rest = take_options(words, NODE_OPTIONS | GPU_OPTIONS | RATES, USAGE, strict=False)
    rest += [f"--train.{name}={options.pop(name)}" for name in GPU_OPTIONS if name in options]
    arguments = parse(rest, USAGE, FLAGS)
    config = load_config(arguments.files, arguments.overrides)
    check_colocation(config)
    defaults = dict(zip(RATES, (NETWORK_GBITS, INSIDE_GBITS), strict=True))
    rates = {name: _rate(name, options.pop(name, str(default))) for name, default in defaults.items()}
    wanted = wanted_nodes(options)
    ranks = layout_on(config, *wanted) if wanted else layout_somewhere(config)
    memory = memory_of(config, None) if wanted else memory_on(config, ranks)
    transfer = transfer_plan(config, ranks)
    if "json" in arguments.flags:
        cost = {"transfer": transfer_json(transfer, rates)} if transfer else {}
        print(json.dumps(ranks.to_json() | {"memory": memory_json(memory)} | cost))
    else:
        print(draw(ranks) if wanted else draw_layout(config))
        print(f"\n{draw_memory(config, memory)}")
        if transfer:
            print(f"\n{draw_transfer(transfer, rates)}")
    sys.stdout.flush()
    require_fit(config, memory)
    return 0


def wanted_nodes(options: dict[str, str]) -> tuple[list[str], tuple[int, ...]] | None:
    """Return names and GPUs of the nodes that the options ask for; None if there are no options. Raises ConfigError."""
    if not options:
        return None
    if "gpus_per_node" not in options or ("nodes" in options) == ("nodelist" in options):
        raise ConfigError(f"--gpus_per_node goes with --nodes or --nodelist: give it and one of these\n{USAGE}")
    listed = slurm_order(dict.fromkeys(expand(options["nodelist"]))) if "nodelist" in options else []
    names = listed or numbered_names(_count("nodes", options))
    text = options["gpus_per_node"]
    try:
        gpus = gpus_of_nodes(text, names)
        if min(gpus) < 1:
            raise ValueError("a node without GPUs cannot be planned for")
    except ValueError as error:
        raise ConfigError(
            f"--gpus_per_node takes the GPUs of every node (8), of one after the other (6,6,4,4,4) or by name "
            f"(fat-[1-2]:6,r01c[01-03]:4), got {text!r} for {shortened(names)}: {error}"
        ) from None
    return names, gpus


def _count(name: str, options: dict[str, str]) -> int:
    text = options[name]
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"--{name} takes a whole number of at least 1, got {text!r}")
    return int(text)


def _rate(name: str, text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not 0 < rate < math.inf:
        raise ConfigError(f"--{name} takes a rate in Gbit/s above 0, got {text!r}")
    return rate


def transfer_plan(config: Config, ranks: RankMap) -> SyncPlan | None:
    """Plan the transfer of the actor's model over `ranks`.

    None where there are no engines, or the model's files do not tell its shapes.
    """
    if not has_engines(config):
        return None
    try:
        stored = stored_parameters(config.actor.model_name_or_path)
    except ModelError:
        return None
    described = [[name, shape, config.ds.param_dtype] for name, shape in stored]
    nodes = {role: [share.node for share in shares for _ in share.ranks] for role, shares in ranks.roles.items()}
    layout = Layout(tuple(nodes["actor"]), tuple(nodes["rollout"]), config.ds.zero_stage)
    on_gpus = ranks.topology.accelerator == GPU and config.sync.backend in ("auto", "nccl", "ipc")
    return make_plan(described, config.sync.bucket_size_mb(on_gpus) << 20, layout)


def transfer_json(plan: SyncPlan, rates: dict[str, float]) -> dict[str, Any]:
    """Return the bytes per rank and link of one update, and the predicted seconds, ready for JSON."""
    found = cost_of(plan)
    actors = len(plan.layout.actors)
    engines = range(actors, plan.layout.world)
    sent = [round(found.sent.get(rank, 0)) for rank in range(plan.layout.world)]
    return {
        "bytes": found.payload,
        "buckets": len(plan.buckets),
        "seconds": found.seconds(*(rate * _GIGABIT for rate in rates.values())),
        **rates,
        "actor_sent": {str(rank): count for rank, count in enumerate(sent[:actors])},
        "engine_sent": {str(rank): count for rank, count in enumerate(sent[actors:])},
        "engine_received": {str(rank - actors): found.payload for rank in engines},
        "links": {
            node: {"out": round(found.out.get(node, 0)), "into": round(found.into.get(node, 0))}
            for node in _nodes(plan)
        },
    }


def draw_transfer(plan: SyncPlan, rates: dict[str, float]) -> str:
    """Format the bytes and seconds of one update for a terminal."""
    found = cost_of(plan)
    actors = range(len(plan.layout.actors))
    engines = range(len(actors), plan.layout.world)
    buckets = "1 bucket" if len(plan.buckets) == 1 else f"{len(plan.buckets)} buckets"
    network, inside = rates.values()
    seconds = max(found.seconds(network * _GIGABIT, inside * _GIGABIT), 0.001)
    lines = [
        f"weight transfer: {_size(found.payload)} in {buckets}, about {seconds:.3g} s at {network:g} Gbit/s "
        f"between nodes and {inside:g} Gbit/s inside",
        f"  an actor rank sends {_range([found.sent.get(rank, 0) for rank in actors])}",
        f"  an engine rank receives {_size(found.payload)} "
        f"and hands on {_range([found.sent.get(rank, 0) for rank in engines])}",
    ]
    for node in _nodes(plan)[:8]:
        lines.append(f"  {node}: {_size(found.out.get(node, 0))} out, {_size(found.into.get(node, 0))} in")
    rest = len(_nodes(plan)) - 8
    return "\n".join([*lines, f"  and {rest} more nodes"] if rest > 0 else lines)


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


COMMANDS = {
    "plan": Command(
        USAGE,
        "Shows which rank of which role goes on which accelerator slot of which node, and starts nothing. The nodes "
        "are those of the Slurm allocation it runs in, those that the options name, or as many as the configuration "
        "asks for. If the model has a config.json and the kind of GPU is known, it adds the memory that each role "
        "needs, and fails if that does not fit. If the model has weights, it adds the bytes that a weight transfer "
        "sends over each link, and how long that takes. The keys below decide.",
        run,
        FLAGS | NODE_OPTIONS | GPU_OPTIONS | RATES,
        KEYS,
    ),
}
