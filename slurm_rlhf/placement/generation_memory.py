"""Estimate what the actor's ranks hold while they sample themselves (rollout.engine = hf)."""

from __future__ import annotations

from collections.abc import Mapping

from slurm_rlhf.config.roles import ACTOR, roles_by_slots
from slurm_rlhf.config.schema import Config
from slurm_rlhf.placement import trainer_memory as tm
from slurm_rlhf.placement.model_shape import ModelShape
from slurm_rlhf.placement.trainer_memory import Pass

SCORES = 6
"""fp32 tensors of all logits of a step, at most: logits and a copy, log-probs, probabilities, noise, scores."""


def terms(config: Config, shape: ModelShape, whole: bool) -> dict[str, int]:
    """Estimate the bytes of a batch of responses; `whole`: every rank has all parameters meanwhile."""
    half = config.ds.param_dtype != "fp32"
    width, rows = 2 if half else 4, config.rollout.hf_max_num_seqs
    of_token = 2 * shape.kv_heads * shape.head_dim * width
    # A layer's keys and values are copied when a token is appended.
    cache = rows * config.data.max_len * of_token * (shape.layers + 1)
    longest = max(1, config.data.max_len - config.rollout.max_new_tokens)
    prompts = Pass(rows * longest, longest, width, attention=config.ds.attn_implementation)
    found = {
        "KV cache": cache,
        "activations of prompts": tm.forward_work(shape, prompts),
        "logits": SCORES * 4 * rows * shape.vocab,
    }
    if config.ds.zero_stage == 0 and half:
        found["16-bit weights"] = 2 * shape.parameters
    if config.ds.zero_stage == 3:
        largest = max(tensor.elements for tensor in shape.tensors)
        gathered = width * shape.parameters if whole else tm.gathered(shape.parameters, largest, half)
        found["gathered parameters"] = gathered
    return found


def fits_whole(config: Config, shape: ModelShape, held: Mapping[str, int], gpu: int) -> bool:
    """Tell whether every rank of the actor has room for all parameters while it samples.

    `held`: the bytes that each role has on the GPU, of `gpu` bytes, between two calls.
    """
    slots = next(group for group in roles_by_slots(config, list(held)) if ACTOR in group)
    return sum(held[role] for role in slots) + sum(terms(config, shape, whole=True).values()) <= gpu
