"""Estimate the memory of a rank of each role, check whether a run fits its GPUs, and name the keys that help if not.

An `Account` has a row for each use of a GPU.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from slurm_rlhf.config.keys import changed, get
from slurm_rlhf.config.roles import (
    ACTOR,
    ROLES,
    ROLLOUT,
    RoleSpec,
    has_engines,
    of_command,
    roles_by_slots,
    running_roles,
)
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import ModelError
from slurm_rlhf.placement import rank_memory
from slurm_rlhf.placement.gpus import GIB
from slurm_rlhf.placement.model_shape import ModelShape, read_shape

# Estimates, not measured: a context with its libraries, and the buffers of a group's communicators.
CONTEXT, GROUP, SYNC_GROUP = 3 * GIB // 4, GIB // 2, GIB // 4

Models = Mapping[str, ModelShape]
"""Role -> the shape of its model."""
Bytes = Mapping[str, int]
"""Term -> bytes."""


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Hold the bytes of one rank of a role."""

    role: str
    resting: Bytes  # bytes held as long as the rank lives
    phases: Mapping[str, Bytes]  # phase -> bytes beyond `resting`, released afterwards
    parked: Bytes = field(default_factory=dict)  # the part of `resting` that is moved away while the engines work
    pinned: int = 0  # bytes of host memory that the parked part takes

    def at(self, phase: str) -> dict[str, int]:
        """Return all terms in `phase`; "" is rest, "parked" is while the engines work."""
        if phase == "parked":
            return {name: size - self.parked.get(name, 0) for name, size in self.resting.items()}
        return {**self.resting, **self.phases.get(phase, {})}

    def worst(self) -> str:
        """Return the phase that takes most."""
        return max(self.phases, key=lambda phase: sum(self.at(phase).values()))


@dataclass(frozen=True, slots=True)
class Row:
    """Describe what one GPU holds at one time."""

    name: str  # a role, or the use of a shared GPU
    ranks: int  # ranks of the role; 0 for a GPU shared by several
    terms: tuple[tuple[str, int], ...]  # (name of the term, bytes), largest first
    there: int  # bytes of the GPU; 0 for a role that shares its GPU, whose total is in another row
    role: str  # role that works at that time

    @property
    def needed(self) -> int:
        return sum(size for _, size in self.terms)

    @property
    def fits(self) -> bool:
        return not self.there or self.needed <= self.there

    @property
    def together(self) -> bool:
        """Tell whether several roles share the GPU; then each term begins with the name of its role."""
        return self.ranks == 0

    @property
    def by_role(self) -> dict[str, int]:
        """Return the bytes of each role on a shared GPU, the largest first."""
        sums: dict[str, int] = {}
        for what, size in self.terms:
            role = what.partition("'s ")[0]
            sums[role] = sums.get(role, 0) + size
        return dict(sorted(sums.items(), key=lambda item: -item[1]))


@dataclass(frozen=True, slots=True)
class Account:
    """Hold the memory of a run."""

    rows: tuple[Row, ...]
    engine: rank_memory.EngineMemory | None  # None: the actor's ranks sample (rollout.engine = hf)
    wanted: int  # sequences that an engine gets at once; 0: nothing is sampled
    pinned: int  # bytes of host memory for each GPU while the engines work

    def fits(self, role: str = "") -> bool:
        """Tell whether `role` (empty: every role) always fits; an engine's KV cache must hold a whole sequence, too."""
        rows = [row for row in self.rows if not role or row.role == role]
        holds = self.engine is None or self.engine.sequences >= 1 or role not in ("", ROLLOUT)
        return holds and all(row.fits for row in rows)


def read_models(config: Config) -> Models:
    """Read the config.json of every role that `config` starts. Raises ModelError."""
    return {role.name: read_shape(*role.model(config)) for role in running_roles(config)}


def known_models(config: Config) -> Models | None:
    """Read them as `read_models` does; None where one is not known."""
    try:
        return read_models(config)
    except ModelError:
        return None


def of_stage(config: Config, stage: str) -> Config:
    """Return the configuration by which the memory of a stage is estimated: all of its passes have one budget."""
    budget = {"train.forward_max_tokens_per_gpu": config.train.max_tokens_per_gpu}
    return changed(of_command(config, stage), {**budget, "actor.entropy_coef": 0.0, "ds.enable_sleep": False})


def headless(shape: ModelShape) -> ModelShape:
    """Return the shape of a model whose head has a single row; the row is not counted."""
    return replace(shape, vocab=0, tensors=tuple(tensor for tensor in shape.tensors if tensor.kind != "head"))


def account(config: Config, models: Models, gpu: int, samples: bool = True) -> Account:
    """Estimate the memory of a run with `config` on GPUs of `gpu` bytes; a stage does not sample."""
    held = rank_memories(config, models, gpu) if samples else _alone(config, models, gpu)
    rows: list[Row] = []
    for group in roles_by_slots(config, list(held)):
        shared = len(group) > 1
        for role in group:
            terms = held[role].at(held[role].worst())
            rows.append(_row(role, terms, 0 if shared else gpu, role, ROLES[role].ranks(config)))
        if shared:
            rows += _together(config, [held[role] for role in group], gpu)
    responses = config.rollout.batch_size * config.rollout.n_samples_per_prompt
    wanted = min(config.vllm.max_num_seqs, -(-responses // config.vllm.num_engines)) if samples else 0
    pinned = max(sum(held[role].pinned for role in group) for group in roles_by_slots(config, list(held)))
    memory = rank_memory.engine(config, models[ROLLOUT], gpu) if has_engines(config) else None
    return Account(tuple(rows), memory, wanted, pinned)


SAFE = 0.9
"""Largest estimated share of a GPU at which train.gradient_checkpointing = auto still chooses off."""


def least_recomputed(config: Config, models: Models, gpu: int, samples: bool = True) -> tuple[Config, Account]:
    """Choose train.gradient_checkpointing where it is auto: off where that is safe for all trainers, else full.

    Selective took 1 % less time than full on an H200, for 8 GiB more (docs/cluster.md), so it is not chosen. Returns
    the configuration with the chosen value, or `config` itself if there is nothing to choose, and its memory.
    """
    if config.train.gradient_checkpointing != "auto" or config.actor.gradient_checkpointing_enable is not None:
        return config, account(config, models, gpu, samples)
    for way in ("off", "full"):
        settled = changed(config, {"train.gradient_checkpointing": way})
        found = account(settled, models, gpu, samples)
        trainers = [row for row in found.rows if row.there and ROLES[row.role].kind == "trained"]
        if all(row.needed <= SAFE * row.there for row in trainers):
            break
    return settled, found


def rank_memories(config: Config, models: Models, gpu: int) -> dict[str, RankMemory]:
    """Estimate what a rank of each role that `config` starts holds, on GPUs of `gpu` bytes."""
    found = _alone(config, models, gpu)
    if not has_engines(config):
        generation = rank_memory.hf_terms(config, models[ACTOR], gathers_once(config, gpu, models))
        actor = found[ACTOR]
        found[ACTOR] = RankMemory(ACTOR, actor.resting, {**actor.phases, "generation": generation}, actor.parked)
    return found


def gathers_once(config: Config, gpu: int, models: Models | None = None) -> bool:
    """Decide whether every rank of the actor has all parameters while it samples (rollout.engine = hf).

    Otherwise it gathers layer by layer. `gpu`: its bytes; 0: a CPU, whose memory is not estimated. Without `models` it
    reads their directories. A model of unknown shape is gathered layer by layer, which needs least.
    """
    if config.ds.zero_stage != 3 or config.rollout.hf_gather != "auto":
        return config.ds.zero_stage != 3 or config.rollout.hf_gather == "batch"
    if not gpu:
        return True
    if (models := models or known_models(config)) is None:
        return False
    held = _alone(config, models, gpu)
    slots = next(group for group in roles_by_slots(config, list(held)) if ACTOR in group)
    resting = sum(sum(held[role].resting.values()) for role in slots)
    return resting + sum(rank_memory.hf_terms(config, models[ACTOR], whole=True).values()) <= gpu


def _alone(config: Config, models: Models, gpu: int) -> dict[str, RankMemory]:
    """Estimate the roles without what the actor needs to sample."""
    found = {}
    for role in running_roles(config):
        shape = models[role.name]
        if role.kind == "engine":
            found[role.name] = _engine(config, shape, gpu)
        else:
            found[role.name] = (_trainer if role.kind == "trained" else _frozen)(config, shape, role)
    return found


def _trainer(config: Config, shape: ModelShape, role: RoleSpec) -> RankMemory:
    ds, ranks = config.ds, role.ranks(config)
    elements, sizes = rank_memory.trained(config, shape, role.head)
    largest = max(sizes, default=0)
    held = rank_memory.trainer_states(config, shape, role.name)
    buckets = rank_memory.reduce_buckets(config, elements) if ranks > 1 or ds.zero_stage else 0
    resting = {"parameters": held.parameters, "optimizer states": held.optimizer, **_context(role.name, ranks)}
    moment = {"gradients": held.gradients, "reduce buckets": buckets}
    if held.resting_gradients:
        resting["gradients"] = held.resting_gradients
    if ds.zero_stage == 3:
        resting["reduce buckets"] = buckets
    moved = ("optimizer states", "gradients", "reduce buckets") if ds.enable_sleep and ds.zero_stage >= 2 else ()
    parked = {name: resting[name] for name in moved if name in resting}
    phases = {
        "update": moment | rank_memory.update_terms(config, shape, role),
        "forward": rank_memory.forward_terms(config, shape, role.head, ds.zero_stage == 3),
        "step": moment | {"optimizer's work": rank_memory.step_work(elements, ranks, ds.zero_stage, largest)},
    }
    if role.name == ACTOR and has_engines(config):
        bucket = min(config.sync.bucket_size_mb(on_gpus=True) << 20, (2 if rank_memory.half(config) else 4) * elements)
        sent = {"sync buffers": 3 * bucket}
        if config.train.colocate_all:
            resting |= sent  # engines on the same GPU keep these buffers mapped
        else:
            phases["sync"] = sent
    # torch pins powers of two: masters, and AdamW's two moments, are three tensors of the same size.
    tensor = held.optimizer // 3
    return RankMemory(role.name, resting, phases, parked, 3 << (tensor - 1).bit_length() if parked else 0)


def _frozen(config: Config, shape: ModelShape, role: RoleSpec) -> RankMemory:
    group = role.settings(config)
    ranks, cut = role.ranks(config), group.zero_stage == 3
    held, sizes = rank_memory.tensors(shape, role.head)
    if cut:
        held = rank_memory.persistent(sizes, held) + (0 if group.offload else -(-held // ranks))
    resting = {"parameters": (2 if rank_memory.half(config) else 4) * held, **_context(role.name, ranks if cut else 1)}
    return RankMemory(role.name, resting, {"forward": rank_memory.forward_terms(config, shape, role.head, cut)})


def _engine(config: Config, shape: ModelShape, gpu: int) -> RankMemory:
    """Estimate a rank of an engine, which takes its whole share of the GPU, whatever it needs."""
    rank = rank_memory.engine(config, shape, gpu)
    bucket = config.sync.bucket_size_mb(on_gpus=True) << 20
    module = 2 * rank.weights * max(shape.head, 2 * shape.hidden * shape.width) // shape.parameters
    resting = {"CUDA graphs": rank.graphs, **_context(ROLLOUT, config.vllm.tensor_parallel_size)}
    awake = {"weights": rank.weights, "a step's work": rank.work, "KV cache": max(rank.kv, 0)}
    # With adapters, updates bring no base weights, so an engine that sleeps keeps them in host memory.
    pinned = rank.weights if config.train.colocate_all and config.lora.rank else 0
    return RankMemory(ROLLOUT, resting, {"generation": awake | {"weight update": 3 * bucket + module}}, pinned=pinned)


def _context(role: str, ranks: int) -> dict[str, int]:
    group = GROUP if ranks > 1 and role != ROLLOUT else 0  # an engine's is in its share
    return {"CUDA and NCCL": CONTEXT + group + (SYNC_GROUP if role in (ACTOR, ROLLOUT) else 0)}


def _together(config: Config, held: list[RankMemory], gpu: int) -> Iterator[Row]:
    """List the uses of a shared GPU. With train.colocate_all one role works at a time, else all may."""

    def use(name: str, worker: RankMemory, phase: str, rest: str) -> Row:
        terms: dict[str, int] = {}
        for one in held:
            now = phase if one is worker else "" if one.role == ROLLOUT else rest
            terms |= {f"{one.role}'s {what}": size for what, size in one.at(now).items()}
        return _row(f"  together: {name}", terms, gpu, worker.role)

    if not config.train.colocate_all:
        worker = held[0]
        uses = [use(phase, worker, phase, "forward" if phase == "forward" else "") for phase in worker.phases]
        yield max(uses, key=lambda row: row.needed)
        return
    for one in sorted(held, key=lambda one: one.role != ROLLOUT):
        if one.role == ROLLOUT:
            yield use("generation", one, "generation", "parked")
        else:
            yield use(f"{one.role} {one.worst()}", one, one.worst(), "")


def _row(name: str, terms: dict[str, int], there: int, role: str, ranks: int = 0) -> Row:
    largest = sorted(((what, size) for what, size in terms.items() if size), key=lambda item: -item[1])
    return Row(name, ranks, tuple(largest), there, role)


def gib(size: float) -> str:
    """Write bytes in GiB: `12.3`."""
    return f"{size / GIB:.1f}"


LOWER, RAISE = "lower", "raise"

WAYS: list[tuple[str, str, str, object]] = json.loads(Path(__file__).with_name("ways.json").read_text(encoding="utf-8"))
"""Rows of (kinds of roles, their term, key that makes it smaller, LOWER, RAISE or a value; a ZeRO stage: or above)."""

_SHARE = ("vllm.gpu_memory_utilization", LOWER)
_FOR_ONE_SEQUENCE: list[tuple[str, object]] = [
    ("vllm.gpu_memory_utilization", RAISE),
    ("vllm.tensor_parallel_size", RAISE),
]
"""Keys that leave more room for an engine's KV cache."""


def help_for(config: Config, row: Row) -> list[str]:
    """Say which two keys help where the role of `row` does not fit: `lower train.max_tokens_per_gpu (now 16384)`.

    One key for each of the largest terms comes first. The new value is computed for vllm.gpu_memory_utilization only.
    Empty: no key helps.
    """
    terms = [_FOR_ONE_SEQUENCE] if row.role == ROLLOUT and row.fits else _ways(row)
    sentences = [[text for key, how in ways if (text := _said(config, key, how, row))] for ways in terms]
    first, others = [texts[0] for texts in sentences if texts], [text for texts in sentences for text in texts[1:]]
    return list(dict.fromkeys(first + others))[:2]


def _ways(row: Row) -> Iterator[list[tuple[str, object]]]:
    """List the keys for each term of a row, the largest first; on a shared GPU terms begin with their role."""
    for term, _ in row.terms:
        owner, _, what = term.partition("'s ") if row.together else (row.role, "", term)
        role = ROLES[owner]
        if row.role == ROLLOUT and role.kind == "trained":  # its states stay on the GPU while the engines work
            yield [("ds.enable_sleep", True)]
        else:
            yield [(key.format(group=role.group), how) for key, how in ways_for(role, what)]


def ways_for(role: RoleSpec, term: str) -> list[tuple[str, object]]:
    """List (key, its new value, LOWER or RAISE) for the keys that make a term of a role smaller."""
    return [(key, how) for kinds, name, key, how in WAYS if role.kind in kinds.split() and term == name]


def _said(config: Config, key: str, how: object, row: Row) -> str:
    """Say what to do with a key; empty where that is done already."""
    effective: dict[str, Any] = {
        "train.forward_max_tokens_per_gpu": config.train.forward_tokens,
        "train.gradient_checkpointing": config.checkpointing,
    }
    value = effective.get(key) or get(config, key)
    if how in (LOWER, RAISE):
        # A sequence that is longer than the budget is a micro-batch by itself.
        used_up = key.endswith("max_tokens_per_gpu") and value <= config.data.max_len
        share = value - (row.needed / row.there - 1) if (key, how) == _SHARE and row.there else 0
        fits = f" to {math.floor(100 * share) / 100}" if share > 0 else ""
        return "" if used_up else f"{how} {key}{fits} (now {value})"
    done = value == how or (isinstance(how, int) and value > how)
    return "" if done else f"set {key} = {str(how).lower()}"
