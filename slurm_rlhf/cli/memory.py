"""Show the memory that a run needs, and refuse one that does not fit its GPUs."""

from __future__ import annotations

import textwrap
from typing import Any

from slurm_rlhf.cluster.resources import Memory, memory_on
from slurm_rlhf.config.roles import ROLLOUT
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import PlacementError
from slurm_rlhf.placement.memory import Account, Row, gib, help_for
from slurm_rlhf.placement.rank_map import RankMap
from slurm_rlhf.placement.topology import GPU

WIDTH = 100  # columns
_LARGEST = 3


def check_memory(config: Config, ranks: RankMap) -> Config:
    """Return the configuration of a run that fits its GPUs, with what their memory decides; print what that is.

    Prints a note if memory cannot be estimated. Raises PlacementError if the run does not fit.
    """
    if ranks.topology.accelerator != GPU:
        return config
    memory = memory_on(config, ranks)
    require_fit(memory)
    said = _chosen_line(memory) if memory.account else f"memory cannot be estimated: {memory.unknown}"
    if said:
        print(said, flush=True)
    return memory.config


def _chosen_line(memory: Memory) -> str:
    """Say what the memory of the GPUs has decided; empty: nothing."""
    way = memory.config.train.gradient_checkpointing
    return f"train.gradient_checkpointing is {way} by the memory of the GPUs." if memory.chosen else ""


def draw_memory(memory: Memory) -> str:
    """Draw a row per role, at most 100 columns wide."""
    if memory.account is None:
        return textwrap.fill(f"memory: unknown: {memory.unknown}", WIDTH, subsequent_indent="  ")
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
        lines.append(textwrap.fill(what, WIDTH, initial_indent=head, subsequent_indent=" " * len(head)))
    notes = [_kv_line(memory.config, memory.account), *(f"{note}." for note in memory.size.notes)]
    notes += filter(None, [_chosen_line(memory)])
    if pinned := memory.account.pinned:
        notes.append(f"Host memory: {gib(pinned)} GiB for each GPU are pinned for optimizer states (ds.enable_sleep).")
    return "\n".join([*lines, *(textwrap.fill(note, WIDTH) for note in notes)])


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
            lines += [_problem(worst, config, found), textwrap.indent(textwrap.fill(advice, WIDTH - 4), "    ")]
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
    return textwrap.fill(text, WIDTH, initial_indent="  ", subsequent_indent="    ")
