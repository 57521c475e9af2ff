"""Say what is too large where a run does not fit its GPUs, and which keys help."""

from __future__ import annotations

from collections.abc import Iterator

from slurm_rlhf.config.keys import get
from slurm_rlhf.config.roles import ROLES, ROLLOUT, RoleSpec
from slurm_rlhf.config.schema import Config
from slurm_rlhf.placement.memory import Row

LOWER, RAISE = "lower", "raise"

WAYS = (
    ("trained", "activations", "actor.gradient_checkpointing_enable", True),
    ("trained", "activations", "train.max_tokens_per_gpu", LOWER),
    ("trained", "backward", "train.max_tokens_per_gpu", LOWER),
    ("trained frozen", "forward activations", "train.forward_max_tokens_per_gpu", LOWER),
    ("trained frozen", "logits", "train.logprob_chunk_tokens", LOWER),
    ("trained", "optimizer states", "ds.zero_stage", 2),
    ("trained", "optimizer states", "{group}.num_nodes", RAISE),
    ("trained", "gradients", "ds.zero_stage", 2),
    ("trained", "parameters", "ds.zero_stage", 3),
    ("trained", "KV cache", "rollout.hf_max_num_seqs", LOWER),
    ("trained", "activations of prompts", "rollout.hf_max_num_seqs", LOWER),
    ("trained", "gathered parameters", "rollout.hf_gather", "layer"),
    ("frozen", "parameters", "{group}.zero_stage", 3),
    ("frozen", "parameters", "{group}.offload", True),
    ("engine", "KV cache", "vllm.gpu_memory_utilization", LOWER),
    ("engine", "weights", "vllm.tensor_parallel_size", RAISE),
    ("trained", "activations", "data.max_len", LOWER),
    ("trained frozen", "forward activations", "data.max_len", LOWER),
)
"""Kinds of roles, their term, the key that makes it smaller, and how: a value (of stages: or more), lower, or raise."""

_FOR_ONE_SEQUENCE: list[tuple[str, object]] = [
    ("vllm.gpu_memory_utilization", RAISE),
    ("vllm.tensor_parallel_size", RAISE),
]
"""Keys that leave more room for an engine's KV cache."""


def help_for(config: Config, row: Row, most: int = 2) -> list[str]:
    """Say which keys help where the role of `row` does not fit: `lower train.max_tokens_per_gpu (now 16384)`.

    One for each of the largest terms comes first; how much is needed is not computed. Empty: no key helps.
    """
    terms = [_FOR_ONE_SEQUENCE] if row.role == ROLLOUT and row.fits else _ways(row)
    sentences = [[text for key, how in ways if (text := _said(config, key, how))] for ways in terms]
    first, others = [texts[0] for texts in sentences if texts], [text for texts in sentences for text in texts[1:]]
    return list(dict.fromkeys(first + others))[:most]


def _ways(row: Row) -> Iterator[list[tuple[str, object]]]:
    """List the keys for each term of a row, the largest first; on a shared GPU terms begin with their role."""
    for term, _ in row.terms:
        owner, _, what = term.partition("'s ") if row.together else (row.role, "", term)
        role = ROLES[owner]
        if row.role == ROLLOUT and role.kind == "trained":  # its states rest on the GPU while the engines work
            yield [("ds.enable_sleep", True)]
        else:
            yield [(key.format(group=role.group), how) for key, how in ways_for(role, what)]


def ways_for(role: RoleSpec, term: str) -> list[tuple[str, object]]:
    """List the keys, each with how, that make a term of a role smaller."""
    return [(key, how) for kinds, name, key, how in WAYS if role.kind in kinds.split() and term == name]


def _said(config: Config, key: str, how: object) -> str:
    """Say what to do with a key; empty where that is done already."""
    value = config.train.forward_tokens if key == "train.forward_max_tokens_per_gpu" else get(config, key)
    if how in (LOWER, RAISE):
        # A sequence that is longer than the budget is a micro-batch by itself.
        used_up = key.endswith("max_tokens_per_gpu") and value <= config.data.max_len
        return "" if used_up else f"{how} {key} (now {value})"
    done = value == how or (isinstance(how, int) and value > how)
    return "" if done else f"set {key} = {str(how).lower()}"
