"""Run `slurm-rlhf plan`: show where ranks go, what memory they need, and what a weight transfer costs."""

from __future__ import annotations

import json
import os
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from slurm_rlhf.cli.main import Command, number, parse, take_options
from slurm_rlhf.cli.memory import WIDTH, draw_memory, memory_json, require_fit
from slurm_rlhf.cluster.resources import Memory, current_topology, memory_of, memory_on
from slurm_rlhf.cluster.slurm_environment import read_slurm
from slurm_rlhf.cluster.slurm_notation import expand, gpus_of_nodes, slurm_order
from slurm_rlhf.config.check import check_colocation
from slurm_rlhf.config.load import load_config
from slurm_rlhf.config.model_directory import sent_parameters
from slurm_rlhf.config.roles import ROLES, colocations, has_engines
from slurm_rlhf.config.schema import Config
from slurm_rlhf.config.text import dump_toml
from slurm_rlhf.errors import ConfigError, ModelError, shortened
from slurm_rlhf.placement.rank_map import RankMap, draw, place, process_slots
from slurm_rlhf.placement.replacement import chosen
from slurm_rlhf.placement.step_time import GIGABIT, INSIDE_GBITS, NETWORK_GBITS, Links, StepTime, predict
from slurm_rlhf.placement.topology import CPU, GPU, Node, Topology, numbered_names, role_sizes
from slurm_rlhf.weights.routes import cost_of
from slurm_rlhf.weights.transfer_plan import Layout, SyncPlan, make_plan

EXAMPLE_NODES = "Not in a Slurm allocation: these nodes stand for those that sbatch --nodes={nodes} would get."


def layout_here(config: Config, environ: Mapping[str, str] = os.environ, nodes: Sequence[str] = ()) -> RankMap:
    """Place the ranks of a run that starts now, on this machine or in its Slurm allocation.

    `nodes`: use only these nodes of the allocation; empty: all but the last `cluster.spares`. Raises PlacementError if
    roles do not fit.
    """
    colocate = colocations(config)
    slurm = read_slurm(environ) if config.cluster.spares and not nodes else None
    if slurm is not None:
        nodes = chosen(slurm.job_nodes, (), (), config.cluster.spares)
    return place(current_topology(config, colocate, environ, nodes), role_sizes(config), colocate)


def layout_on(config: Config, names: Sequence[str], gpus: Sequence[int]) -> RankMap:
    """Place the ranks on imagined nodes, with `gpus` on each. Raises PlacementError if roles do not fit."""
    nodes = tuple(Node(name, count) for name, count in zip(names, gpus, strict=True))
    return place(Topology(nodes), role_sizes(config), colocations(config))


def layout_somewhere(config: Config, environ: Mapping[str, str] = os.environ) -> RankMap:
    """Place the ranks as `layout_here`; outside an allocation, on example nodes if roles need several nodes."""
    nodes = _example_nodes(config, environ)
    if nodes == 0:
        return layout_here(config, environ)
    roles, colocate = role_sizes(config), colocations(config)
    topology = Topology(tuple(Node(name, 0) for name in numbered_names(nodes)), CPU)
    return place(process_slots(topology, roles, colocate), roles, colocate)


def draw_layout(config: Config, environ: Mapping[str, str] = os.environ) -> str:
    """Draw the rank map of `layout_somewhere` as a grid. Raises PlacementError if roles do not fit."""
    drawn = draw(layout_somewhere(config, environ))
    nodes = _example_nodes(config, environ)
    return f"{EXAMPLE_NODES.format(nodes=nodes)}\n\n{drawn}" if nodes else drawn


def _example_nodes(config: Config, environ: Mapping[str, str]) -> int:
    """Return how many example nodes are needed; 0 if real nodes are used."""
    nodes = max(size.num_nodes for size in role_sizes(config))
    return nodes if nodes > 1 and read_slurm(environ) is None else 0


def print_resolved(config: Config, layout: str, memory: Memory, more: Iterable[str] = ()) -> None:
    """Print what --dry_run shows: the configuration, and as comments the drawn `layout`, the memory, and `more`."""
    text = "\n".join([layout, "", draw_memory(memory), "", *more])
    print(f"{dump_toml(config)}\n{textwrap.indent(text, '# ', lambda line: True)}", flush=True)


USAGE = (
    "usage: slurm-rlhf plan FILE.toml [FILE.toml ...] [--KEY=VALUE ...] [--json]\n"
    "                       [--gpus_per_node=GPUS (--nodes=N | --nodelist=LIST)]\n"
    "                       [--gpu=NAME | --gpu_memory_gb=GB] [--network_gbits=RATE] [--inside_gbits=RATE]\n"
    "                       [--mean_response=TOKENS]"
)
FLAGS = {
    "json": "print one JSON object: accelerator, nodes, roles (role -> node, gpus, ranks), tp_groups, world, memory, "
    "transfer, step"
}
NODE_OPTIONS = {
    "nodes": "plan for this many nodes",
    "nodelist": "plan for these nodes, in Slurm's notation: gpu[001-003,007]; they are sorted as Slurm sorts nodes",
    "gpus_per_node": "GPUs of every node: 8; or node by node, in Slurm's order: 6,6,4,4,4; or by name: "
    "fat-[1-2]:6,r01c[01-03]:4",
}
GPU_OPTIONS = {
    "gpu": "kind of the GPUs, the same as train.gpu: h100, a100_40gb, h200, ...",
    "gpu_memory_gb": "memory of a GPU as it is sold, the same as train.gpu_memory_gb",
}
RATES = {
    "network_gbits": f"Gbit/s of a node's links in each direction, to predict the seconds [{NETWORK_GBITS:g}]",
    "inside_gbits": f"Gbit/s between the ranks of one node [{INSIDE_GBITS:g}]",
}
LENGTHS = {"mean_response": "tokens of a response in the mean, to predict the seconds of a step [0.42 of the longest]"}


SIZES = ("num_nodes", "num_gpus_per_node")
KEYS = [f"{role.group}.{size}" for role in ROLES.values() if role.kind != "engine" for size in SIZES]
KEYS += ["rollout.engine", "vllm.num_engines", "vllm.tensor_parallel_size", "vllm.num_nodes"]
KEYS += ["algo.advantage.estimator", "train.plugins", "algo.kl.init_coef", "reward.model_name_or_path"]
KEYS += ["train.colocate_all", *filter(None, (role.colocation_key for role in ROLES.values()))]
KEYS += ["ds.zero_stage", "ds.param_dtype", "sync.bucket_mb"]
KEYS += ["train.gpu", "train.gpu_memory_gb", "train.max_tokens_per_gpu", "train.forward_max_tokens_per_gpu"]
KEYS += ["train.logprob_chunk_tokens", "train.gradient_checkpointing", "data.max_len", "ds.enable_sleep"]
KEYS += ["actor.gradient_checkpointing_enable", "ds.ulysses_size"]
KEYS += ["ref.zero_stage", "ref.offload", "vllm.gpu_memory_utilization", "vllm.max_num_seqs"]
KEYS += ["rollout.hf_max_num_seqs", "rollout.hf_gather", "rollout.max_new_tokens"]


def run(words: list[str]) -> int:
    """Print the plan. Raises ConfigError, and PlacementError if the roles or their memory do not fit."""
    options, rest = take_options(words, NODE_OPTIONS | GPU_OPTIONS | RATES | LENGTHS, USAGE, strict=False)
    mean = float(number("mean_response", options.pop("mean_response", "0"), float, least=0))
    rest += [f"--train.{name}={options.pop(name)}" for name in GPU_OPTIONS if name in options]
    arguments = parse(rest, USAGE, FLAGS)
    config = load_config(arguments.files, arguments.overrides)
    check_colocation(config)
    defaults = dict(zip(RATES, (NETWORK_GBITS, INSIDE_GBITS), strict=True))
    rates = {
        name: float(number(name, options.pop(name, str(default)), float, least=1e-3))
        for name, default in defaults.items()
    }
    wanted = wanted_nodes(options)
    ranks = layout_on(config, *wanted) if wanted else layout_somewhere(config)
    memory = memory_of(config, None) if wanted else memory_on(config, ranks)
    transfer = transfer_plan(config, ranks)
    time = step_time(config, ranks, memory, transfer, rates, mean) if has_engines(config) else None
    if "json" in arguments.flags:
        cost = {"transfer": transfer_json(transfer, rates)} if transfer else {}
        cost |= {"step": asdict(time)} if time else {}
        print(json.dumps(ranks.to_json() | {"memory": memory_json(memory)} | cost))
    else:
        print(draw(ranks) if wanted else draw_layout(config))
        print(f"\n{draw_memory(memory)}")
        if transfer:
            print(f"\n{draw_transfer(transfer, rates)}")
        if time:
            print(f"\n{draw_step(time, memory.size.name)}")
    sys.stdout.flush()
    require_fit(memory)
    return 0


def wanted_nodes(options: dict[str, str]) -> tuple[list[str], tuple[int, ...]] | None:
    """Return names and GPUs of the nodes that the options describe; None without options. Raises ConfigError."""
    if not options:
        return None
    if "gpus_per_node" not in options or ("nodes" in options) == ("nodelist" in options):
        raise ConfigError(f"--gpus_per_node goes with --nodes or --nodelist: give it and one of these two\n{USAGE}")
    listed = slurm_order(dict.fromkeys(expand(options["nodelist"]))) if "nodelist" in options else []
    names = listed or numbered_names(number("nodes", options["nodes"]))
    text = options["gpus_per_node"]
    try:
        gpus = gpus_of_nodes(text, names)
        if min(gpus) < 1:
            raise ValueError("every node needs a GPU")
    except ValueError as error:
        raise ConfigError(
            f"--gpus_per_node takes the GPUs of every node (8), node by node (6,6,4,4,4) or by name "
            f"(fat-[1-2]:6,r01c[01-03]:4), got {text!r} for {shortened(names)}: {error}"
        ) from None
    return names, gpus


def transfer_plan(config: Config, ranks: RankMap) -> SyncPlan | None:
    """Plan the transfer of the actor's model over `ranks`; None without engines, or if its shapes are not known."""
    if not has_engines(config):
        return None
    try:
        sent = sent_parameters(config.actor.model_name_or_path, config.lora)
    except ModelError:
        return None
    described = [[name, shape, config.ds.param_dtype] for name, shape in sent]
    nodes = {role: [share.node for share in shares for _ in share.ranks] for role, shares in ranks.roles.items()}
    layout = Layout(tuple(nodes["actor"]), tuple(nodes["rollout"]), config.ds.zero_stage)
    on_gpus = ranks.topology.accelerator == GPU and config.sync.backend in ("auto", "nccl", "ipc")
    return make_plan(described, config.sync.bucket_size_mb(on_gpus) << 20, layout)


def transfer_json(plan: SyncPlan, rates: dict[str, float]) -> dict[str, Any]:
    """Return the bytes of one update per rank and link, and the predicted seconds, ready for JSON."""
    found = cost_of(plan)
    actors = len(plan.layout.actors)
    engines = range(actors, plan.layout.world)
    sent = [round(found.sent.get(rank, 0)) for rank in range(plan.layout.world)]
    return {
        "bytes": found.payload,
        "buckets": len(plan.buckets),
        "seconds": found.seconds(*(rate * GIGABIT for rate in rates.values())),
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
    seconds = max(found.seconds(network * GIGABIT, inside * GIGABIT), 0.001)
    lines = [
        f"weight transfer: {_size(found.payload)} in {buckets}, about {seconds:.3g} s at {network:g} Gbit/s "
        f"between nodes and {inside:g} Gbit/s inside",
        f"  an actor rank sends {_range([found.sent.get(rank, 0) for rank in actors])}",
        f"  an engine rank receives {_size(found.payload)} "
        f"and forwards {_range([found.sent.get(rank, 0) for rank in engines])}",
    ]
    for node in _nodes(plan)[:8]:
        lines.append(f"  {node}: {_size(found.out.get(node, 0))} out, {_size(found.into.get(node, 0))} in")
    rest = len(_nodes(plan)) - 8
    return "\n".join([*lines, f"  and {rest} more nodes"] if rest > 0 else lines)


def step_time(
    config: Config, ranks: RankMap, memory: Memory, transfer: SyncPlan | None, rates: dict[str, float], mean: float
) -> StepTime | None:
    """Predict the seconds of a step; None without a known GPU or a known model."""
    gpu = memory.size.gpu
    if memory.models is None or gpu is None or not gpu.bf16_tflops or ranks.topology.accelerator != GPU:
        return None
    network, inside = (rate * GIGABIT for rate in rates.values())
    sync = cost_of(transfer).seconds(network, inside) if transfer else 0.0
    return predict(memory.config, memory.models, gpu, Links(network, inside), sync, mean)


def draw_step(time: StepTime, gpu: str) -> str:
    """Format the seconds of a step for a terminal."""
    phases = ", ".join(f"{name} {seconds:.3g} s" for name, seconds in time.phases.items())
    text = (
        f"a step, predicted and not measured, for responses of {time.mean_response:.0f} tokens in the mean: "
        f"{time.step:.3g} s on {gpu} ({phases}); it waits for {time.binds}. MFU {time.mfu:.0%}, of the update "
        f"{time.mfu_update:.0%}; {time.tokens_per_gpu:.0f} tokens/s/GPU; GPUs idle {time.idle:.0%}."
    )
    return textwrap.fill(text, WIDTH, subsequent_indent="  ")


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
        "are those of the Slurm allocation it runs in, those that the options describe, or as many as the "
        "configuration asks for. If the model has a config.json and the kind of GPU is known, it adds the memory that "
        "each role needs, and fails if it does not fit. If the model has weights, it adds the bytes that a weight "
        "transfer sends over each link, and how long that takes. It uses the keys below.",
        run,
        FLAGS | NODE_OPTIONS | GPU_OPTIONS | RATES | LENGTHS,
        KEYS,
    ),
}
