"""Report where roles go and what memory they need, as `plan` shows it and `train` checks it."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slurm_rlhf.cluster.gpu_query import local_kinds
from slurm_rlhf.cluster.resources import current_topology, process_slots
from slurm_rlhf.cluster.slurm_environment import read_slurm
from slurm_rlhf.cluster.slurm_job import granted_types
from slurm_rlhf.config.key_text import dump_toml
from slurm_rlhf.config.model_directory import check_tensor_parallel
from slurm_rlhf.config.roles import ROLLOUT, colocations, has_engines
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import ModelError, PlacementError
from slurm_rlhf.placement.gpus import TELL, GpuSize, found_size, told_size
from slurm_rlhf.placement.memory import Account, Row, account, gib
from slurm_rlhf.placement.rank_map import RankMap, draw, place
from slurm_rlhf.placement.rank_memory import Models, read_models
from slurm_rlhf.placement.remedies import Remedy, changed, fits, remedies
from slurm_rlhf.placement.replacement import chosen
from slurm_rlhf.placement.role_sizes import role_sizes
from slurm_rlhf.placement.topology import CPU, GPU, Node, Topology, numbered_names

EXAMPLE_NODES = "Not in a Slurm allocation: these nodes stand for those that sbatch --nodes={nodes} would get."
_WIDTH = 100
_LARGEST = 3


def layout_here(config: Config, environ: Mapping[str, str] = os.environ, nodes: Sequence[str] = ()) -> RankMap:
    """Place the ranks of a run that starts now, on this machine or in its Slurm allocation.

    `nodes`: these of the allocation; empty: all but the last `cluster.spares`. Raises PlacementError when roles do not
    fit.
    """
    colocate = colocations(config)
    slurm = read_slurm(environ) if config.cluster.spares and not nodes else None
    if slurm is not None:
        nodes = chosen(slurm.job_nodes, (), (), config.cluster.spares)
    return place(current_topology(config, colocate, environ, nodes), role_sizes(config), colocate)


def layout_on(config: Config, names: Sequence[str], gpus: Sequence[int]) -> RankMap:
    """Place the ranks on nodes that need not exist, with `gpus` on each. Raises PlacementError if roles do not fit."""
    nodes = tuple(Node(name, count) for name, count in zip(names, gpus, strict=True))
    return place(Topology(nodes), role_sizes(config), colocations(config))


def layout_somewhere(config: Config, environ: Mapping[str, str] = os.environ) -> RankMap:
    """Place the ranks as `layout_here`, but on example nodes if roles need several and this is no allocation."""
    nodes = _example_nodes(config, environ)
    if nodes == 0:
        return layout_here(config, environ)
    roles, colocate = role_sizes(config), colocations(config)
    topology = Topology(tuple(Node(name, 0) for name in numbered_names(nodes)), CPU)
    return place(process_slots(topology, roles, colocate), roles, colocate)


def draw_layout(config: Config, environ: Mapping[str, str] = os.environ) -> str:
    """Draw the rank map of `layout_somewhere` as a grid. Raises PlacementError when the roles do not fit."""
    drawn = draw(layout_somewhere(config, environ))
    nodes = _example_nodes(config, environ)
    return f"{EXAMPLE_NODES.format(nodes=nodes)}\n\n{drawn}" if nodes else drawn


def _example_nodes(config: Config, environ: Mapping[str, str]) -> int:
    """Count the example nodes that are needed; 0 if real ones are used."""
    nodes = max(size.num_nodes for size in role_sizes(config))
    return nodes if nodes > 1 and read_slurm(environ) is None else 0


@dataclass(frozen=True, slots=True)
class Memory:
    """Hold the memory estimate; without one, `unknown` says why."""

    size: GpuSize
    unknown: str = ""
    account: Account | None = None
    models: Models | None = None


def memory_of(config: Config, found: GpuSize | None) -> Memory:
    """Estimate the memory of a run on the GPUs that the user names, or else on those `found`.

    Raises ConfigError for an unknown kind of GPU, and for a tensor-parallel size that does not divide the model.
    """
    size = told_size(config.train.gpu, config.train.gpu_memory_gb) or found
    if size is None:
        return Memory(GpuSize(0), f"there are no GPUs here; to estimate it for a machine with GPUs, add {TELL}")
    if not size.memory:
        return Memory(size, "; ".join(size.notes))
    try:
        models = read_models(config)
    except ModelError as error:
        return Memory(size, str(error))
    actor = config.actor.model_name_or_path
    if has_engines(config):
        check_tensor_parallel("actor.model_name_or_path", actor, config.vllm.tensor_parallel_size)
    return Memory(size, "", account(config, models, size.memory), models)


def memory_on(config: Config, ranks: RankMap) -> Memory:
    """Estimate as `memory_of`, on the GPUs of this machine or its allocation, if the ranks use any.

    Blocks for up to a minute if nothing answers.
    """
    on_gpus = ranks.topology.accelerator == GPU
    return memory_of(config, found_size(local_kinds(os.environ), granted_types(os.environ)) if on_gpus else None)


def check_memory(config: Config, ranks: RankMap) -> None:
    """Raise PlacementError if the run is known not to fit its GPUs; print a note if that is unknown."""
    if ranks.topology.accelerator != GPU:
        return
    memory = memory_on(config, ranks)
    require_fit(config, memory)
    if memory.account is None:
        print(f"memory cannot be estimated: {memory.unknown}", flush=True)


def print_resolved(config: Config, layout: str, memory: Memory, more: Sequence[str] = ()) -> None:
    """Print what --dry_run shows: the configuration, then as comments the drawn `layout`, the memory, and `more`."""
    print(dump_toml(config))
    told = "".join(f"\n{line}" for line in ("", *more))
    print(textwrap.indent(f"{layout}\n\n{draw_memory(config, memory)}{told}", "# ", lambda line: True), flush=True)


def draw_memory(config: Config, memory: Memory) -> str:
    """Draw a row per role, at most 100 columns wide."""
    if memory.account is None:
        return textwrap.fill(f"memory: unknown: {memory.unknown}", _WIDTH, subsequent_indent="  ")
    title = f"Memory of a GPU in GiB ({memory.size.name}: {memory.size.gib:.1f})"
    rows = [("", "needed", "there", title)]
    for row in memory.account.rows:
        there = gib(row.there) if row.there else ""
        mark = "" if row.fits else "DOES NOT FIT: "
        parts = list(row.by_role.items()) if row.together else row.terms[:_LARGEST]
        largest = ", ".join(f"{what} {gib(size)}" for what, size in parts if gib(size) != "0.0")
        rows.append((row.name, gib(row.needed), there, mark + largest))
    width = max(len(row[0]) for row in rows)
    lines = []
    for name, needed, there, what in rows:
        head = f"{name:{width}}  {needed:>6}  {there:>6}  "
        lines.append(textwrap.fill(what, _WIDTH, initial_indent=head, subsequent_indent=" " * len(head)))
    notes = [
        _kv_line(config, memory.account),
        *_copies_line(memory.account),
        *(f"{note}." for note in memory.size.notes),
    ]
    return "\n".join([*lines, *(textwrap.fill(note, _WIDTH) for note in notes)])


def _kv_line(config: Config, found: Account) -> str:
    engine, wanted = found.engine, found.wanted
    if engine is None:
        return (
            f"A rank of the actor samples {config.rollout.hf_max_num_seqs} responses at a time, of up to data.max_len "
            f"= {config.data.max_len} tokens (rollout.engine = hf)."
        )
    fewer = " (not all fit at once: sampling takes longer)" if engine.sequences < wanted else ""
    return (
        f"KV cache of an engine: {engine.blocks} blocks, {int(engine.sequences)} sequences of data.max_len = "
        f"{config.data.max_len}; {wanted} are requested at once{fewer}."
    )


def _copies_line(found: Account) -> list[str]:
    if not found.copies:
        return []
    each = ", ".join(f"{gib(size)} GiB by each rank of {role}" for role, size in found.copies.items())
    return [f"Host memory that ckpt.async_save takes for copies: {each}."]


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
        "fits": found.fits,
        "rows": [
            {
                "name": row.name.strip(),
                "role": row.role,
                "ranks": row.ranks,
                "needed": row.needed,
                "there": row.there or None,
                "fits": row.fits,
                "terms": dict(row.terms),
            }
            for row in found.rows
        ],
        "host_copies": found.copies,
        "kv_cache": found.engine
        and {
            "block_bytes": found.engine.block,
            "blocks": found.engine.blocks,
            "sequences": found.engine.sequences,
            "wanted": found.wanted,
        },
    }


def require_fit(config: Config, memory: Memory) -> None:
    """Raise PlacementError if the run is known not to fit: names the largest terms, and settings that do fit."""
    found, models = memory.account, memory.models
    if found is None or models is None or found.fits:
        return
    advised = config
    lines = [f"this run does not fit its GPUs, {memory.size.name} with {memory.size.gib:.1f} GiB:"]
    for role in dict.fromkeys(row.role for row in found.rows):
        if not fits(found, role):
            worst = max((row for row in found.rows if row.role == role), key=lambda row: (not row.fits, row.needed))
            lines.append(_problem(worst, config, found))
            if fits(account(advised, models, memory.size.memory), role):
                lines.append("    it fits with the same settings")
                continue
            offered = remedies(advised, models, memory.size.memory, worst)
            lines += _advice(offered)
            advised = changed(advised, offered[0].change) if offered else advised
    raise PlacementError("\n".join(lines))


def _problem(row: Row, config: Config, found: Account) -> str:
    largest = ", ".join(f"{what} {gib(size)}" for what, size in row.terms[:_LARGEST])
    if row.role == ROLLOUT and row.fits and found.engine is not None:
        text = (
            f"rollout: {gib(max(found.engine.kv, 0))} GiB are left for the KV cache, {found.engine.sequences:.2f} of a "
            f"sequence of data.max_len = {config.data.max_len}; the rest is taken by {largest}"
        )
    else:
        where = row.role if row.name == row.role else f"{row.role}, {row.name.strip()}"
        text = f"{where}: {gib(row.needed)} GiB are needed, most of them for {largest}"
    return textwrap.fill(text, _WIDTH, initial_indent="  ", subsequent_indent="    ")


def _advice(found: list[Remedy]) -> list[str]:
    if not found:
        return ["    no setting makes it fit: use more GPUs, GPUs with more memory, or a smaller model"]
    lines = ["    it fits with" + (" any of" if len(found) > 1 else "")]
    for remedy in found:
        text = f"{remedy} ({gib(remedy.needed)} GiB)"
        lines.append(textwrap.fill(text, _WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 8))
    return lines
