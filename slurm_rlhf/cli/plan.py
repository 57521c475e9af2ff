"""Run `slurm-rlhf plan`: show where ranks go, what memory they need, and what a weight transfer costs."""

from __future__ import annotations

import json
import os
import statistics
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from slurm_rlhf.cli.commands import Arguments
from slurm_rlhf.cluster.resources import Memory, current_topology, memory_of, memory_on
from slurm_rlhf.cluster.slurm_environment import expand, expand_counts, per_node, read_slurm, slurm_order
from slurm_rlhf.config.check import check_colocation
from slurm_rlhf.config.keys import changed, get
from slurm_rlhf.config.load import load_config
from slurm_rlhf.config.pipeline import TRAIN, TRAINING
from slurm_rlhf.config.roles import REWARD, ROLLOUT, colocations, has_engines, has_reward, of_command
from slurm_rlhf.config.schema import Config
from slurm_rlhf.config.schema_jobs import STAGES
from slurm_rlhf.config.text import dump_toml
from slurm_rlhf.errors import ConfigError, PlacementError, UserError, shortened, shortened_lines
from slurm_rlhf.placement.memory import Account, Row, gib, help_for
from slurm_rlhf.placement.rank_map import RankMap, draw, place, process_slots
from slurm_rlhf.placement.replacement import chosen
from slurm_rlhf.placement.step_time import GIGABIT, PROMPT, Links, StepLengths, StepTime, predict
from slurm_rlhf.placement.topology import CPU, GPU, Node, Topology, numbered_names, role_sizes
from slurm_rlhf.weights.routes import cost_of, transfer_plan
from slurm_rlhf.weights.transfer_plan import SyncPlan

EXAMPLE_NODES = "Not in a Slurm allocation: these nodes stand for those that sbatch --nodes={nodes} would get."
_WIDTH = 100
_LARGEST = 3
_PROMPTS = 256
"""Most prompts of the data set that are read for their mean length."""


def layout_here(config: Config, environ: Mapping[str, str] = os.environ, nodes: Sequence[str] = ()) -> RankMap:
    """Place the ranks of a run that starts now, on this machine or in its Slurm allocation.

    `nodes`: use only these nodes of the allocation; empty: all but the last `cluster.spares`, and those for workers.
    Raises PlacementError if roles do not fit.
    """
    topology = current_topology(config, environ, nodes)
    if config.cluster.spares and not nodes and read_slurm(environ) is not None:
        taken = chosen([node.name for node in topology.nodes], (), (), config.cluster.spares)
        topology = current_topology(config, environ, taken)
    return place(topology, role_sizes(config), colocations(config))


def layout_on(config: Config, names: Sequence[str], gpus: Sequence[int]) -> RankMap:
    """Place the ranks on imagined nodes, with `gpus` on each. Raises PlacementError if roles do not fit."""
    nodes = tuple(Node(name, count) for name, count in zip(names, gpus, strict=True))
    topology = Topology(nodes).keep_for_workers(config.reward.workers_num_nodes)
    return place(topology, role_sizes(config), colocations(config))


def layout_somewhere(config: Config, environ: Mapping[str, str] = os.environ) -> RankMap:
    """Place the ranks as `layout_here`; outside an allocation, on example nodes if roles need several nodes."""
    nodes = _example_nodes(config, environ)
    if nodes == 0:
        return layout_here(config, environ)
    roles, colocate = role_sizes(config), colocations(config)
    topology = Topology(tuple(Node(name, 0) for name in numbered_names(nodes)), CPU)
    topology = topology.keep_for_workers(config.reward.workers_num_nodes)
    return place(process_slots(topology, roles, colocate), roles, colocate)


def draw_layout(config: Config, environ: Mapping[str, str] = os.environ) -> str:
    """Draw the rank map of `layout_somewhere` as a grid. Raises PlacementError if roles do not fit."""
    drawn = draw(layout_somewhere(config, environ))
    nodes = _example_nodes(config, environ)
    return f"{EXAMPLE_NODES.format(nodes=nodes)}\n\n{drawn}" if nodes else drawn


def _example_nodes(config: Config, environ: Mapping[str, str]) -> int:
    """Return how many example nodes are needed; 0 if real nodes are used."""
    nodes = max(1, *(size.num_nodes for size in role_sizes(config))) + config.reward.workers_num_nodes
    return nodes if nodes > 1 and read_slurm(environ) is None else 0


def check_memory(config: Config, ranks: RankMap, command: str = TRAIN) -> Config:
    """Return the configuration with `train.gradient_checkpointing` as the GPUs' memory decides it; print the decision.

    `command`: `train`, or a stage. Prints a note if memory cannot be estimated. Raises PlacementError if the run does
    not fit.
    """
    if ranks.topology.accelerator != GPU:
        return config
    memory = memory_on(config, ranks, command)
    require_fit(memory)
    said = _chosen_line(memory) if memory.account else f"memory cannot be estimated: {memory.unknown}"
    if said:
        print(said, flush=True)
    return changed(config, {"train.gradient_checkpointing": memory.config.train.gradient_checkpointing})


def _chosen_line(memory: Memory) -> str:
    """Say what the memory of the GPUs has decided; empty: nothing."""
    way = memory.config.train.gradient_checkpointing
    return f"train.gradient_checkpointing is {way} by the memory of the GPUs." if memory.chosen else ""


def print_resolved(config: Config, layout: str, memory: Memory, more: Iterable[str] = ()) -> None:
    """Print what --dry_run shows: the configuration, and as comments the drawn `layout`, the memory, and `more`."""
    text = "\n".join([layout, "", draw_memory(memory), "", *more])
    print(f"{dump_toml(config)}\n{textwrap.indent(text, '# ', lambda line: True)}", flush=True)


def draw_memory(memory: Memory) -> str:
    """Draw a row per role, at most 100 columns wide."""
    if memory.account is None:
        return textwrap.fill(f"memory: unknown: {memory.unknown}", _WIDTH, subsequent_indent="  ")
    title = f"Memory of a GPU in GiB ({memory.size.name}: {memory.size.gib:.1f})"
    rows = [("", "needed", "there", title)]
    for row in memory.account.rows:
        mark = "" if row.fits else "DOES NOT FIT: "
        parts = list(row.by_role.items()) if row.together else row.terms[:_LARGEST]
        largest = ", ".join(f"{what} {gib(size)}" for what, size in parts if gib(size) != "0.0")
        rows.append((row.name, gib(row.needed), gib(row.there) if row.there else "", mark + largest))
    width = max(len(row[0]) for row in rows)
    lines = []
    for name, needed, there, what in rows:
        head = f"{name:{width}}  {needed:>6}  {there:>6}  "
        lines.append(textwrap.fill(what, _WIDTH, initial_indent=head, subsequent_indent=" " * len(head)))
    kv = [_kv_line(memory.config, memory.account)] if memory.account.wanted else []
    notes = [*kv, *(f"{note}." for note in memory.size.notes), *filter(None, [_chosen_line(memory)])]
    if pinned := memory.account.pinned:
        notes.append(
            f"Host memory: {gib(pinned)} GiB for each GPU are pinned: optimizer states (ds.enable_sleep), weights of "
            "engines that sleep (lora.rank)."
        )
    return "\n".join([*lines, *(textwrap.fill(note, _WIDTH) for note in notes)])


def _kv_line(config: Config, found: Account) -> str:
    engine, wanted = found.engine, found.wanted
    if engine is None:
        return (
            f"A rank of the actor samples {config.rollout.hf_at_once(on_gpus=True)} responses at a time, of up to "
            f"data.max_len = {config.data.max_len} tokens (rollout.engine = hf)."
        )
    fewer = " (not all fit at once: sampling takes longer)" if engine.sequences < wanted else ""
    return (
        f"KV cache of an engine: {engine.blocks} blocks, {int(engine.sequences)} sequences of data.max_len = "
        f"{config.data.max_len}; {wanted} are requested at once{fewer}."
    )


def memory_json(memory: Memory) -> dict[str, Any]:
    """Return the estimate in bytes, ready for JSON."""
    found = memory.account
    if found is None:
        return {"known": False, "why": memory.unknown}
    return {
        "known": True,
        "gpu": memory.size.name,
        "gpu_bytes": memory.size.memory,
        "notes": list(memory.size.notes),
        "fits": found.fits(),
        "pinned_host_bytes": found.pinned,
        "rows": [
            asdict(row) | {"name": row.name.strip(), "needed": row.needed, "fits": row.fits} for row in found.rows
        ],
        "kv_cache": (kv := found.engine) and {"blocks": kv.blocks, "sequences": kv.sequences, "wanted": found.wanted},
    }


def require_fit(memory: Memory) -> None:
    """Raise PlacementError if the run does not fit: with the largest parts of each role, and keys that help."""
    found, config = memory.account, memory.config
    if found is None or found.fits():
        return
    lines = [f"this run does not fit its GPUs, {memory.size.name} with {memory.size.gib:.1f} GiB:"]
    for role in dict.fromkeys(row.role for row in found.rows):
        if not found.fits(role):
            worst = max((row for row in found.rows if row.role == role), key=lambda row: (not row.fits, row.needed))
            keys = " or ".join(help_for(config, worst))
            more = "use more GPUs, GPUs with more memory, or a smaller model"
            advice = f"what helps: {keys}; else {more}" if keys else f"no key makes it fit: {more}"
            lines += [_problem(worst, config, found), textwrap.indent(textwrap.fill(advice, _WIDTH - 4), "    ")]
    raise PlacementError("\n".join(lines))


def _problem(row: Row, config: Config, found: Account) -> str:
    largest = ", ".join(f"{what} {gib(size)}" for what, size in row.terms[:_LARGEST])
    if row.role == ROLLOUT and row.fits and found.engine is not None:
        text = (
            f"rollout: {gib(max(found.engine.kv, 0))} GiB are left for the KV cache, {found.engine.sequences:.2f} of a "
            f"sequence of data.max_len = {config.data.max_len}; the rest goes to {largest}"
        )
    else:
        where = row.role if row.name == row.role else f"{row.role}, {row.name.strip()}"
        text = f"{where}: {gib(row.needed)} GiB are needed, most of them for {largest}"
    return textwrap.fill(text, _WIDTH, initial_indent="  ", subsequent_indent="    ")


def show_plan(arguments: Arguments) -> int:
    """Print the plan. Raises ConfigError, and PlacementError if the roles or their memory do not fit."""
    options = arguments.options
    gpu = [f"--train.{name}={options[name]}" for name in ("gpu", "gpu_memory_gb") if name in options]
    config = load_config(arguments.files, [*arguments.overrides, *gpu])
    name = training_command(arguments)
    if name in STAGES:
        out = f"{name}.output_dir"
        config = of_command(changed(config, {out: get(config, out) or name}), name)
    check_colocation(config)
    mean = options.get("mean_response", 0.0)
    rates = {name: float(options[name]) for name in ("network_gbits", "inside_gbits")}
    wanted = wanted_nodes(arguments)
    ranks = layout_on(config, *wanted) if wanted else layout_somewhere(config)
    memory = memory_of(config, None, name) if wanted else memory_on(config, ranks, name)
    transfer = transfer_plan(config, ranks)
    time = step_time(config, ranks, memory, transfer, rates, mean) if has_engines(config) else None
    if "json" in options:
        cost = {"transfer": transfer_json(transfer, rates)} if transfer else {}
        cost |= {"step": asdict(time)} if time else {}
        print(json.dumps(ranks.to_json() | {"memory": memory_json(memory)} | cost))
    else:
        print(draw(ranks) if wanted else draw_layout(config))
        print(f"\n{draw_memory(memory)}")
        if transfer:
            print(f"\n{draw_transfer(transfer, rates)}")
        if time:
            print(f"\n{draw_step(time, memory.size.name, has_reward(config))}")
    sys.stdout.flush()
    require_fit(memory)
    return 0


def training_command(arguments: Arguments) -> str:
    """Return the command that the option --command names. Raises ConfigError."""
    name: str = arguments.options["command"]
    if name not in TRAINING:
        raise arguments.error(f"--command takes one of {', '.join(TRAINING)}, got {name!r}")
    return name


def wanted_nodes(arguments: Arguments) -> tuple[list[str], tuple[int, ...]] | None:
    """Return names and GPUs of the nodes that the options describe; None without options. Raises ConfigError."""
    options = arguments.options
    if not {"gpus_per_node", "nodes", "nodelist"} & set(options):
        return None
    if "gpus_per_node" not in options or ("nodes" in options) == ("nodelist" in options):
        raise arguments.error("--gpus_per_node goes with --nodes or --nodelist: give it and one of these two")
    listed = slurm_order(dict.fromkeys(expand(options["nodelist"]))) if "nodelist" in options else []
    names = listed or numbered_names(options["nodes"])
    text = options["gpus_per_node"]
    try:
        gpus = per_node(expand_counts(text), len(names))
        if min(gpus) < 1:
            raise ValueError("every node needs a GPU")
    except ValueError as error:
        raise ConfigError(
            "--gpus_per_node takes the GPUs of every node (8), or node by node (6,6,4,4,4 or 6(x2),4(x3)), got "
            f"{text!r} for {shortened(names)}: {error}"
        ) from None
    return names, gpus


def transfer_json(plan: SyncPlan, rates: dict[str, float]) -> dict[str, Any]:
    """Return the bytes of one update per rank and link, and the predicted seconds, ready for JSON."""
    found = cost_of(plan)
    return {
        "bytes": found.payload,
        "buckets": len(plan.buckets),
        "seconds": found.seconds(*(rate * GIGABIT for rate in rates.values())),
        **rates,
        "sent": {str(rank): round(found.sent.get(rank, 0)) for rank in range(plan.layout.world)},
        "links": {node: {"out": found.out.get(node, 0), "into": found.into.get(node, 0)} for node in _nodes(plan)},
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
    links = [(node, _size(found.out.get(node, 0)), _size(found.into.get(node, 0))) for node in _nodes(plan)]
    return "\n".join(lines) + shortened_lines([f"{node}: {out} out, {into} in" for node, out, into in links], 8)


def step_time(
    config: Config, ranks: RankMap, memory: Memory, transfer: SyncPlan | None, rates: dict[str, float], mean: float
) -> StepTime | None:
    """Predict the seconds of a step; None without a known GPU or a known model."""
    gpu = memory.size.gpu
    if memory.models is None or gpu is None or not gpu.bf16_tflops or ranks.topology.accelerator != GPU:
        return None
    network, inside = (rate * GIGABIT for rate in rates.values())
    sync = cost_of(transfer).seconds(network, inside) if transfer else None
    batch = StepLengths.expected(memory.config, mean, prompt_tokens(config) or PROMPT)
    return predict(memory.config, memory.models, gpu, Links(network, inside), sync, batch)


def prompt_tokens(config: Config) -> int:
    """Return the mean tokens of the first prompts of the data set; 0 where model or data cannot be read here."""
    from slurm_rlhf.data.prompts import PromptSet
    from slurm_rlhf.data.tokenizer import Tokenizer

    longest = config.data.max_len - config.rollout.max_new_tokens
    try:
        tokenizer = Tokenizer.load(config.actor.model_name_or_path)
        prompts = PromptSet.load(config.data.prompt_dataset, tokenizer, config.data, longest, _PROMPTS)
    except (UserError, OSError):
        return 0
    return round(statistics.mean(len(prompt.token_ids) for prompt in prompts))


def draw_step(time: StepTime, gpu: str, rewards: bool) -> str:
    """Format the seconds of a step for a terminal; `rewards`: the run has rewards."""
    phases = ", ".join(f"{name} {seconds:.3g} s" for name, seconds in time.phases.items())
    real = ", ".join(f"{role} {share:.1%}" for role, share in time.real.items())
    text = (
        f"a step, predicted and not measured, for prompts of {time.mean_prompt:.0f} and responses of "
        f"{time.mean_response:.0f} tokens in the mean: "
        f"{time.step:.3g} s on {gpu} ({phases}); it waits for {time.binds}. MFU {time.mfu:.0%}, of the update "
        f"{time.mfu_update:.0%}; {time.tokens_per_gpu:.0f} tokens/s/GPU; GPUs idle {time.idle:.0%}. Real tokens on an "
        f"update's critical path, the rest is padding and waiting: {real}."
    )
    if rewards and REWARD not in time.phases:
        text += " The reward is a function's, whose time is not predicted."
    if "sync" not in time.phases:
        text += " A weight transfer is left out: its tensors are not known without the model's safetensors files."
    return textwrap.fill(text, _WIDTH, subsequent_indent="  ")


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
