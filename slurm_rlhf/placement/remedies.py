"""Find settings that make a run fit: candidates are tried against the memory estimate, the mildest first."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from slurm_rlhf.config.keys import get, put
from slurm_rlhf.config.roles import ACTOR, ROLES, ROLLOUT, RoleSpec, colocations, has_engines
from slurm_rlhf.config.schema import Config
from slurm_rlhf.placement.memory import Account, Row, account
from slurm_rlhf.placement.rank_memory import Models

Change = dict[str, Any]
"""Key -> value."""

ROOMY = 0.97
"""Share of a GPU that advised settings may use: the rest is a margin for the estimate."""

_HELP = {
    "activations": ("actor.gradient", "train.max_tokens", "train.forward"),
    "backward": ("train.max_tokens",),
    "logits": ("train.logprob",),
    "mask": ("train.max_tokens",),
    "optimizer": ("ds.", "num_nodes"),
    "gradient": ("ds.", "num_nodes"),
    "parameters": ("ds.", "ref.", "reward.", "num_nodes"),
    "KV cache": ("vllm.gpu_memory", "rollout.hf_max"),
    "of prompts": ("rollout.hf_max",),
    "gathered parameters": ("rollout.hf_gather",),
    "weights": ("vllm.tensor",),
}
"""Word in a term -> beginnings of the keys that reduce it most."""


@dataclass(frozen=True, slots=True)
class Remedy:
    """Hold settings with which the role fits, and the bytes that it then needs at most."""

    change: Change
    needed: int

    def __str__(self) -> str:
        return ", ".join(f"{key} = {_toml(value)}" for key, value in self.change.items())


def remedies(config: Config, models: Models, gpu: int, row: Row, most: int = 3) -> list[Remedy]:
    """Find up to `most` settings that make the role of `row` fit: single keys, or else several together."""
    chains = sorted(_chains(config, models, row.role), key=lambda chain: (_more_gpus(chain), not _aims(chain, row)))

    def tried(change: Change) -> Remedy | None:
        return _tried(config, models, gpu, row.role, change)

    found = [remedy for chain in chains if (remedy := next(filter(None, map(tried, chain)), None))]
    if all(_more_gpus([remedy.change]) for remedy in found):
        same = _together([chain for chain in chains if not _more_gpus(chain)], tried)
        found = [*filter(None, [same]), *found]
    return (found or [*filter(None, [_together(chains, tried)])])[:most]


def _together(chains: list[list[Change]], tried: Callable[[Change], Remedy | None]) -> Remedy | None:
    """Combine keys until the role fits, each at the mildest value with which it still fits."""
    remedy, used = None, 0
    strongest: Change = {}
    while remedy is None and used < len(chains):
        strongest |= chains[used][-1]
        remedy, used = tried(strongest), used + 1
    if remedy is None:
        return None
    for chain in chains[:used]:
        rest = {key: value for key, value in remedy.change.items() if key not in chain[-1]}
        milder = next(filter(None, (tried(rest | change) for change in [{}, *chain])), None)
        remedy = milder or remedy
    return remedy


def _tried(config: Config, models: Models, gpu: int, role: str, change: Change) -> Remedy | None:
    result = account(changed(config, change), models, gpu)
    needed = _needs(result, role)
    # An engine takes the share that it is given; what others need is an estimate.
    roomy = role == ROLLOUT or needed <= ROOMY * gpu
    return Remedy(change, needed) if roomy and fits(result, role) else None


def changed(config: Config, change: Change) -> Config:
    """Return a copy of `config` with other values."""
    copied = copy.deepcopy(config)
    for key, value in change.items():
        put(copied, key, value)
    return copied


def fits(result: Account, role: str) -> bool:
    """Tell whether `role` always fits; for an engine, the KV cache must hold a whole sequence, too."""
    engine = role != ROLLOUT or result.holds_a_sequence
    return engine and all(row.fits for row in result.rows if row.role == role)


def _needs(result: Account, role: str) -> int:
    return max(row.needed for row in result.rows if row.role == role)


def _more_gpus(chain: list[Change]) -> bool:
    return any(key.endswith("num_nodes") for key in chain[-1])


def _aims(chain: list[Change], row: Row) -> bool:
    """Tell whether the key of the chain reduces the largest term."""
    what = row.terms[0][0] if row.terms else ""
    starts = next((keys for word, keys in _HELP.items() if word in what), ())
    return any(start in key for key in chain[0] for start in starts)


def _chains(config: Config, models: Models, role: str) -> Iterator[list[Change]]:
    """List the values to try for each key, the mildest first."""
    row = ROLES[role]
    chains = {"trained": _trainer, "frozen": _frozen, "engine": _engine}[row.kind]
    yield from (chain for chain in chains(config, models, row) if chain)
    if role == ACTOR and not has_engines(config):
        yield from filter(
            None, [_halves(config, "rollout.hf_max_num_seqs", config.rollout.hf_at_once(on_gpus=True), 1)]
        )
        if config.rollout.hf_gather == "batch":
            yield [{"rollout.hf_gather": "layer"}]
    if config.train.colocate_all and has_engines(config):
        if not config.ds.enable_sleep and config.ds.zero_stage >= 2:
            yield [{"ds.enable_sleep": True}]
        share = config.vllm.gpu_memory_utilization
        lower = [round(share - 0.05 * step, 2) for step in range(1, int(share / 0.05))]
        yield [{"vllm.gpu_memory_utilization": value} for value in lower if value >= 0.1]


def _trainer(config: Config, models: Models, role: RoleSpec) -> Iterator[list[Change]]:
    if not config.actor.gradient_checkpointing_enable:
        yield [{"actor.gradient_checkpointing_enable": True}]
    yield _halves(config, "train.max_tokens_per_gpu", config.train.max_tokens_per_gpu, config.data.max_len)
    yield _halves(config, "train.forward_max_tokens_per_gpu", config.train.forward_tokens, config.data.max_len)
    yield _halves(config, "train.logprob_chunk_tokens", config.train.logprob_chunk_tokens, 128)
    if config.ds.param_dtype == "fp32":
        yield [{"ds.param_dtype": "bf16"}]
    yield [{"ds.zero_stage": stage} for stage in (2, 3) if stage > config.ds.zero_stage]
    group = role.settings(config)
    more = [group.num_nodes * factor for factor in (2, 4, 8)]
    if not any(role.name in together for together in colocations(config)):
        per_node = group.num_gpus_per_node
        yield [{f"{role.group}.num_nodes": n} for n in more if config.train.batch_size % (n * per_node) == 0]


def _frozen(config: Config, models: Models, role: RoleSpec) -> Iterator[list[Change]]:
    group, key = role.settings(config), role.group
    if group.zero_stage == 0 and role.ranks(config) > 1:
        yield [{f"{key}.zero_stage": 3}, {f"{key}.zero_stage": 3, f"{key}.offload": True}]
    elif not group.offload:
        yield [{f"{key}.zero_stage": 3, f"{key}.offload": True}]
    yield _halves(config, "train.forward_max_tokens_per_gpu", config.train.forward_tokens, config.data.max_len)
    yield _halves(config, "train.logprob_chunk_tokens", config.train.logprob_chunk_tokens, 128)


def _engine(config: Config, models: Models, role: RoleSpec) -> Iterator[list[Change]]:
    shape, vllm = models[role.name], config.vllm
    slots = vllm.num_engines * vllm.tensor_parallel_size
    wider: list[Change] = []
    for tp in (2, 4, 8):
        even = (
            shape.heads % tp == 0 and shape.width % tp == 0 and max(shape.kv_heads, tp) % min(shape.kv_heads, tp) == 0
        )
        if tp > vllm.tensor_parallel_size and even and slots % tp == 0:
            wider.append({"vllm.tensor_parallel_size": tp, "vllm.num_engines": slots // tp})
        elif tp > vllm.tensor_parallel_size and even:
            wider.append({"vllm.tensor_parallel_size": tp})
    yield wider
    share = vllm.gpu_memory_utilization
    if not config.train.colocate_all:
        lower = [round(share - 0.02 * step, 2) for step in range(1, 11) if share - 0.02 * step >= 0.5]
        higher = [round(share + 0.02 * step, 2) for step in range(1, 26) if share + 0.02 * step <= 0.95]
        yield [{"vllm.gpu_memory_utilization": value} for value in higher + lower]
    yield _halves(config, "vllm.max_num_seqs", vllm.max_num_seqs, 16)
    yield _halves(config, "sync.bucket_mb", config.sync.bucket_size_mb(on_gpus=True), 64)


def _halves(config: Config, key: str, value: int, least: int) -> list[Change]:
    """List half of `value`, a quarter, ... and at last `least`."""
    values = []
    while value // 2 > least:
        value //= 2
        values.append(value)
    return [{key: number} for number in [*values, *([least] if value > least else [])] if number != get(config, key)]


def _toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
