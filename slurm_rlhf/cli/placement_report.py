"""Report where roles go and what memory they need, as `plan` shows it and `train` checks it."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from slurm_rlhf.cluster.gpu_memory import Memory, memory_on
from slurm_rlhf.cluster.resources import current_topology
from slurm_rlhf.cluster.slurm_environment import read_slurm
from slurm_rlhf.config.roles import ROLLOUT, colocations
from slurm_rlhf.config.schema import Config
from slurm_rlhf.config.text import dump_toml
from slurm_rlhf.errors import PlacementError
from slurm_rlhf.placement.memory import Account, Row, gib, help_for
from slurm_rlhf.placement.rank_map import RankMap, draw, place, process_slots
from slurm_rlhf.placement.replacement import chosen
from slurm_rlhf.placement.topology import CPU, GPU, Node, Topology, numbered_names, role_sizes

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


def check_memory(config: Config, ranks: RankMap) -> None:
    """Raise PlacementError if the run is known not to fit its GPUs; print a note if that is unknown."""
    if ranks.topology.accelerator != GPU:
        return
    memory = memory_on(config, ranks)
    require_fit(config, memory)
    if memory.account is None:
        print(f"memory cannot be estimated: {memory.unknown}", flush=True)


def print_resolved(config: Config, layout: str, memory: Memory, more: Iterable[str] = ()) -> None:
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
        *(f"{note}." for note in memory.size.notes),
    ]
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
        "kv_cache": found.engine
        and {
            "block_bytes": found.engine.block,
            "blocks": found.engine.blocks,
            "sequences": found.engine.sequences,
            "wanted": found.wanted,
        },
    }


def require_fit(config: Config, memory: Memory) -> None:
    """Raise PlacementError if the run is known not to fit: names the largest terms of each role, and keys that help."""
    found = memory.account
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
            f"sequence of data.max_len = {config.data.max_len}; the rest is taken by {largest}"
        )
    else:
        where = row.role if row.name == row.role else f"{row.role}, {row.name.strip()}"
        text = f"{where}: {gib(row.needed)} GiB are needed, most of them for {largest}"
    return textwrap.fill(text, _WIDTH, initial_indent="  ", subsequent_indent="    ")
