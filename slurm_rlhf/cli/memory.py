"""The memory of a run, as `plan` shows it and `train` insists on it."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slurm_rlhf.cluster.gpu_kinds import granted_types, local_kinds
from slurm_rlhf.config.model_directory import check_tensor_parallel
from slurm_rlhf.config.roles import ROLLOUT
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import ModelError, PlacementError
from slurm_rlhf.placement.gpu_size import TELL, GpuSize, found_size, told_size
from slurm_rlhf.placement.holdings import Models, read_models
from slurm_rlhf.placement.memory import Account, Row, account, gib
from slurm_rlhf.placement.rank_map_file import RankMap
from slurm_rlhf.placement.remedies import Remedy, changed, fits, remedies
from slurm_rlhf.placement.topology import GPU

_WIDTH = 100
_LARGEST = 3


@dataclass(frozen=True, slots=True)
class Memory:
    """What is known: all of it, or `unknown` says what is not."""

    size: GpuSize
    unknown: str = ""
    account: Account | None = None
    models: Models | None = None


def memory_of(config: Config, found: GpuSize | None) -> Memory:
    """The memory of a run on GPUs as the user says, or else as `found`.

    Raises ConfigError for a GPU that nobody knows, and for a size of engines that does not divide the model.
    """
    size = told_size(config.train.gpu, config.train.gpu_memory_gb) or found
    if size is None:
        return Memory(
            GpuSize(0), f"without GPUs there is none of theirs to estimate; for a machine with GPUs say {TELL}"
        )
    if not size.memory:
        return Memory(size, "; ".join(size.notes))
    try:
        models = read_models(config)
    except ModelError as error:
        return Memory(size, str(error))
    actor = config.actor.model_name_or_path
    check_tensor_parallel("actor.model_name_or_path", actor, config.vllm.tensor_parallel_size)
    return Memory(size, "", account(config, models, size.memory), models)


def memory_on(config: Config, ranks: RankMap) -> Memory:
    """`memory_of` on the GPUs of this machine or of the allocation it is in, where the ranks go to any."""
    return memory_of(config, gpus_here() if ranks.topology.accelerator == GPU else None)


def insist_on_memory(config: Config, ranks: RankMap) -> None:
    """Raises PlacementError for what is known not to fit its GPUs. Says so, on GPUs, where it is not known."""
    if ranks.topology.accelerator != GPU:
        return
    memory = memory_on(config, ranks)
    refuse(config, memory)
    if memory.account is None:
        print(f"memory is not known beforehand: {memory.unknown}", flush=True)


def gpus_here(environ: Mapping[str, str] = os.environ) -> GpuSize:
    """Of the GPUs of this machine and of the allocation it is in. Blocks for up to a minute where nothing answers."""
    return found_size(local_kinds(environ), granted_types(environ))


def draw_memory(config: Config, memory: Memory) -> str:
    """A row per role, at most 100 columns wide."""
    if memory.account is None:
        return textwrap.fill(f"memory: not known: {memory.unknown}", _WIDTH, subsequent_indent="  ")
    told = f"Memory of a GPU in GiB ({memory.size.name}: {memory.size.gib:.1f})"
    rows = [("", "needed", "there", told)]
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
    notes = [_kv_line(config, memory.account), *(f"{note}." for note in memory.size.notes)]
    return "\n".join([*lines, *(textwrap.fill(note, _WIDTH) for note in notes)])


def _kv_line(config: Config, found: Account) -> str:
    engine, wanted = found.engine, found.wanted
    fewer = " (they take turns: sampling takes longer)" if engine.sequences < wanted else ""
    return (
        f"KV cache of an engine: {engine.blocks} blocks, {int(engine.sequences)} sequences of data.max_len = "
        f"{config.data.max_len}; {wanted} come at once{fewer}."
    )


def memory_json(memory: Memory) -> dict[str, Any]:
    """JSON-ready; bytes."""
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
        "kv_cache": {
            "block_bytes": found.engine.block,
            "blocks": found.engine.blocks,
            "sequences": found.engine.sequences,
            "wanted": found.wanted,
        },
    }


def refuse(config: Config, memory: Memory) -> None:
    """Raises PlacementError for what is known not to fit: the term that is too large, and settings that do fit."""
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
                lines.append("    it fits with the same")
                continue
            offered = remedies(advised, models, memory.size.memory, worst)
            lines += _advice(offered)
            advised = changed(advised, offered[0].change) if offered else advised
    raise PlacementError("\n".join(lines))


def _problem(row: Row, config: Config, found: Account) -> str:
    largest = ", ".join(f"{what} {gib(size)}" for what, size in row.terms[:_LARGEST])
    if row.role == ROLLOUT and row.fits:
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
