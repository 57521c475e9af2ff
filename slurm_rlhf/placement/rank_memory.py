"""Estimate the bytes on one rank: of a trainer, of a vLLM engine with its KV cache, and of actors that sample.

Token counts include the padding of a micro-batch.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from slurm_rlhf.config.roles import ROLES, RoleSpec
from slurm_rlhf.config.schema import Config
from slurm_rlhf.placement.gpus import GIB
from slurm_rlhf.placement.model_shape import (
    ModelShape,
    Pass,
    autocast_weights,
    forward_work,
    recomputed,
    saved,
    widest,
)

BLOCK = 16  # tokens of a KV block on GPUs
VOCABULARY = 64  # vLLM pads the vocabulary to a multiple of it
LAYERS: dict[str, dict[str, list[str]]] = json.loads(
    Path(__file__).with_name("layers.json").read_text(encoding="utf-8")
)
"""Name of a linear layer -> kinds of its inputs and outputs; `known`: names in most models, `others`: in some."""
CUDA_GRAPHS = GIB  # graphs of the sizes that vLLM captures by default: an estimate
TP_GROUP = GIB // 2  # buffers of a TP group's all-reduces: an estimate


def weights(shape: ModelShape, tp: int, dtype: int) -> int:
    """Count the bytes of the weights of one of `tp` ranks.

    Matrices are cut, norms are not; key-value heads are repeated where there are fewer than ranks.
    """
    vocab = -(-shape.vocab // VOCABULARY) * VOCABULARY
    heads = 1 if shape.tied else 2
    elements = heads * shape.hidden * vocab / tp
    repeated = max(1.0, tp / shape.kv_heads)
    keys = shape.hidden * shape.kv_heads * shape.head_dim * 2 * shape.layers
    elements += (shape.of_kind("attention") - keys + keys * repeated) / tp
    elements += shape.of_kind("mlp", "experts") / tp + shape.of_kind("router", "norm", "bias")
    return round(elements * dtype)


def adapters(config: Config, shape: ModelShape, tp: int, dtype: int) -> int:
    """Count the bytes that one of `tp` ranks reserves for adapters: A on every rank, B cut.

    Queries, keys and values share the input, but each has an A.
    """
    sizes = adapted(shape, config.lora.target_modules) if config.lora.rank else []
    one = sum((wide + high / tp) * layers for wide, high, layers in sizes)
    return round(config.lora.rank * one * dtype) * policies_at_once(config)


def policies_at_once(config: Config) -> int:
    """Count the policies that an engine needs at once, if each response keeps the adapter it began with."""
    return 1 + (config.train.async_queue_size if config.vllm.sync_mode == "inflight" else 0)


def kv_layout(shape: ModelShape) -> tuple[int, tuple[int, ...]]:
    """Group the layers as vLLM does: return the layers of a group, and the window of each group (0: all tokens).

    Layers of a group share the number of a block, groups share one pool. Source:
    `kv_cache_utils._get_kv_cache_groups_uniform_page_size`.
    """
    kinds = sorted(set(shape.windows))
    if len(kinds) == 1:
        return shape.layers, (kinds[0],)
    counts = [shape.windows.count(kind) for kind in kinds]
    size = max(counts) if max(counts) < 1.5 * min(counts) else min(counts)
    groups = tuple(kind for kind, count in zip(kinds, counts, strict=True) for _ in range(-(-count // size)))
    return size, groups


def block_bytes(shape: ModelShape, tp: int, dtype: int, block: int = BLOCK) -> int:
    """Count the bytes of a KV block on one rank: `block` tokens in all layers of a group."""
    heads = max(1, shape.kv_heads // tp)
    return 2 * block * heads * shape.head_dim * dtype * kv_layout(shape)[0]


def blocks_of_sequence(shape: ModelShape, length: int, in_flight: int, block: int = BLOCK) -> int:
    """Count the blocks that a sequence of `length` tokens needs, with `in_flight` tokens computed in one step.

    Source: vLLM, `FullAttentionSpec` and `SlidingWindowSpec.max_memory_usage_bytes`.
    """
    total = 0
    for window in kv_layout(shape)[1]:
        held = min(window - 1 + in_flight, length) if window else length
        total += -(-held // block) + (1 if window else 0)
    return total


def profiled(shape: ModelShape, tp: int, dtype: int, tokens: int, sequences: int) -> int:
    """Estimate the bytes that vLLM reserves after a trial run of `tokens` and `sequences`; not measured.

    That is the widest place of the MLP and the residual stream, or the fp32 logits of all sequences with the buffers of
    sampling, whichever is larger.
    """
    wide = max(shape.width, shape.experts_per_token * shape.expert_width)
    body = tokens * dtype * (4 * shape.hidden + (3 * wide + 2 * shape.heads * shape.head_dim) // tp)
    sampling = sequences * shape.vocab * (dtype + 3 * 4)
    return max(body, sampling)


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """Hold the bytes of one rank of an engine."""

    weights: int
    work: int  # work of a step: activations, logits, buffers between TP ranks
    graphs: int
    kv: int  # left for the KV cache; negative: the weights alone do not fit
    block: int
    blocks: int
    sequences: float  # sequences of data.max_len that the KV cache holds


def engine(config: Config, shape: ModelShape, gpu: int) -> EngineMemory:
    """Estimate one rank of an engine that may use its share of a GPU of `gpu` bytes."""
    vllm, tp = config.vllm, config.vllm.tensor_parallel_size
    tokens = 16384 if gpu >= 70 * GIB else 8192  # tokens of a step; source: vLLM, `EngineArgs.get_batch_defaults`
    dtype = 4 if (config.ds.param_dtype if vllm.dtype == "auto" else vllm.dtype) == "fp32" else 2
    held = weights(shape, tp, dtype) + adapters(config, shape, tp, dtype)
    work = profiled(shape, tp, dtype, tokens, vllm.max_num_seqs) + (TP_GROUP if tp > 1 else 0)
    graphs = 0 if vllm.enforce_eager else CUDA_GRAPHS
    kv = int(vllm.gpu_memory_utilization * gpu) - held - work - graphs
    block = block_bytes(shape, tp, dtype)
    blocks = max(0, kv // block)
    # A step may be prepared while another runs.
    per_sequence = blocks_of_sequence(shape, config.data.max_len, 2 * tokens)
    return EngineMemory(held, work, graphs, kv, block, blocks, blocks / per_sequence)


SCORES = 6
"""fp32 tensors of all logits of a step, at most: logits and a copy, log-probs, probabilities, noise, scores."""


def hf_terms(config: Config, shape: ModelShape, whole: bool) -> dict[str, int]:
    """Estimate the bytes of a batch of responses on ranks of the actor that sample themselves (rollout.engine = hf).

    `whole`: every rank has all parameters meanwhile.
    """
    width, rows = 2 if half(config) else 4, config.rollout.hf_at_once(on_gpus=True)
    of_token = 2 * shape.kv_heads * shape.head_dim * width
    # A layer's keys and values are copied when a token is appended.
    cache = rows * config.data.max_len * of_token * (shape.layers + 1)
    longest = max(1, config.data.max_len - config.rollout.max_new_tokens)
    found = {
        "KV cache": cache,
        "activations of prompts": forward_work(shape, rows * longest, width),
        "logits": SCORES * 4 * rows * shape.vocab,
    }
    if config.ds.zero_stage == 0 and half(config):
        found["16-bit weights"] = 2 * shape.parameters
    if config.ds.zero_stage == 3:
        largest = max(tensor.elements for tensor in shape.tensors)
        layers = gathered(shape.parameters, largest, half(config))
        found["gathered parameters"] = width * shape.parameters if whole else layers
    return found


BUCKET = 200_000_000  # elements of a reduce bucket, at most
ALL_REDUCE = 500_000_000  # elements that are reduced at once without ZeRO, at most
LIVE = 1_000_000_000  # elements that ZeRO-3 gathers ahead, at most


@dataclass(frozen=True, slots=True)
class States:
    """Hold the bytes on one rank."""

    parameters: int
    gradients: int  # largest size, just before an optimizer step
    optimizer: int  # AdamW's two moments in fp32, and fp32 masters where there are any
    resting_gradients: int = 0  # part of `gradients` that stays between two optimizer steps


def states(elements: int, ranks: int, stage: int, param_dtype: str, small: int = 0) -> States:
    """Estimate the states of a model of `elements` parameters under ZeRO `stage` over `ranks`.

    `small` counts the elements of tensors that ZeRO-3 does not cut. At stage 0 parameters are fp32, under autocast.
    Stage 1 keeps whole gradients: in bf16 the new ones and their fp32 sum, in fp16 the sum.
    Source: Rajbhandari et al., ZeRO (2020), section 3, with the trainers' choices of precision.
    """
    width = 2 if param_dtype != "fp32" and stage else 4
    part = -(-elements // ranks)
    if stage == 0:
        return States(4 * elements, 4 * elements, 8 * elements)
    if stage == 3:
        return States(width * (part + small), 4 * part, 12 * part, 4 * part)
    if stage == 2:
        return States(width * elements, 4 * part, 12 * part)
    summed = 4 * elements if param_dtype == "bf16" else 0
    return States(width * elements, summed + width * elements if summed else 4 * elements, 12 * part, summed)


def trainer_states(config: Config, shape: ModelShape, role: str) -> States:
    """Estimate parameters, gradients and optimizer states of a rank of a trained role."""
    ranks, ds = ROLES[role].ranks(config), config.ds
    elements, sizes = tensors(shape, ROLES[role].head)
    small = persistent(sizes, elements) if ds.zero_stage == 3 else 0
    held = states(elements, ranks, ds.zero_stage, ds.param_dtype, small)
    if ds.zero_stage == 3 and ds.hpz_size > 1:
        copy = (2 if half(config) else 4) * -(-elements // ds.hpz_size)
        held = replace(held, parameters=held.parameters + copy)
    if not config.lora.rank:
        return held
    own = states(trained(config, shape, ROLES[role].head)[0], ranks, ds.zero_stage, ds.param_dtype)
    return replace(own, parameters=held.parameters + own.parameters)


def trained(config: Config, shape: ModelShape, head: bool) -> tuple[int, dict[int, int]]:
    """Count the trained elements, and the tensors of each size, as `tensors` does; with lora.rank those of adapters."""
    if not config.lora.rank:
        return tensors(shape, head)
    counts = {} if head else {shape.hidden: 1}
    for wide, high, layers in adapted(shape, config.lora.target_modules):
        for size in (wide * config.lora.rank, high * config.lora.rank):
            counts[size] = counts.get(size, 0) + layers
    return sum(size * count for size, count in counts.items()), counts


def adapted(shape: ModelShape, targets: list[str]) -> list[tuple[int, int, int]]:
    """List (inputs, outputs, number) of the linear layers that get adapters; unknown names are not counted."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    sizes = {"hidden": shape.hidden, "width": shape.width, "gated": 2 * shape.width}
    sizes |= {"queries": queries, "keys": keys, "attention": queries + 2 * keys}
    known, every = LAYERS["known"], LAYERS["known"] | LAYERS["others"]
    named = (
        known.values() if "all-linear" in targets else [every[name] for name in dict.fromkeys(targets) if name in every]
    )
    return [(sizes[wide], sizes[high], shape.layers) for wide, high in named]


def tensors(shape: ModelShape, head: bool) -> tuple[int, dict[int, int]]:
    """Count the elements of all parameters, and the tensors of each size.

    Without a vocabulary head, a model has a head of a single row.
    """
    counts = {} if head else {shape.hidden: 1}
    for tensor in shape.tensors:
        if head or tensor.kind != "head":
            counts[tensor.elements] = counts.get(tensor.elements, 0) + tensor.count
    return sum(size * count for size, count in counts.items()), counts


def half(config: Config) -> bool:
    """Return whether models compute in 16 bits."""
    return config.ds.param_dtype != "fp32"


def reduce_buckets(config: Config, elements: int) -> int:
    """Count the bytes of the buckets that reduce gradients: two from ZeRO-1 on, one sent while the other fills."""
    width = 2 if config.ds.grad_comm_dtype == "bf16" else 4
    return width * (2 * min(elements, BUCKET) if config.ds.zero_stage else min(elements, ALL_REDUCE))


def gathered(elements: int, largest: int, half: bool) -> int:
    """Count the bytes of the layers that ZeRO-3 gathers at the same time."""
    return (2 if half else 4) * min(elements, max(LIVE, largest))


def persistent(sizes: dict[int, int], elements: int) -> int:
    """Count the elements of tensors, size -> count, that are so small that ZeRO-3 keeps them whole."""
    threshold = min(elements // 100, 100_000)
    return sum(size * count for size, count in sizes.items() if size <= threshold)


def step_work(elements: int, ranks: int, stage: int, largest: int) -> int:
    """Estimate an optimizer step beyond states and gradients: square roots of AdamW, flat gradients, their norm.

    The norm of each piece of the gradient is taken in fp64.
    """
    part = -(-elements // ranks) if stage else elements
    return 4 * part + max(4 * part if stage else 0, 8 * min(largest, part))


def longest_part(config: Config) -> int:
    """Count the tokens of the longest sequence that a rank computes; others of its group compute the rest."""
    return -(-config.data.max_len // config.ds.ulysses_size)


def update_terms(config: Config, shape: ModelShape, role: RoleSpec) -> dict[str, int]:
    """Estimate forward and backward of a micro-batch; a sequence that is longer than the budget is one by itself."""
    ds, longest = config.ds, longest_part(config)
    tokens, width = max(config.train.max_tokens_per_gpu, longest), 2 if half(config) else 4
    autocast = half(config) and ds.zero_stage == 0
    how = Pass(tokens, longest, width, config.checkpointing, ds.attn_implementation, autocast)
    elements, sizes = trained(config, shape, role.head)
    largest = max(sizes, default=0)
    # The largest gradient is sent alone if no bucket holds it.
    alone = (2 if ds.grad_comm_dtype == "bf16" else 4) * largest if largest > min(elements, BUCKET) else 0
    terms = {
        "activations": saved(shape, how) + recomputed(shape, how) + autocast_weights(shape, how),
        "backward": tokens * width * (2 * widest(shape) + 2 * shape.hidden),  # the MLP is widest; not measured
        "loose gradient": width * largest + alone,
    }
    if role.head and ds.fp32_lm_head and half(config) and ds.zero_stage:  # at stage 0 parameters are fp32
        terms["fp32 head"] = 8 * shape.head
    # Log-probabilities, their gradient, and the gradient of the logits in fp32 and in the precision of the head.
    each = 12 + (2 if width == 2 and not ds.fp32_lm_head else 0) + (8 if config.actor.entropy_coef else 0)
    return terms | _any_pass(config, shape, role.head, ds.zero_stage == 3, tokens, each)


def forward_terms(config: Config, shape: ModelShape, head: bool, cut: bool) -> dict[str, int]:
    """Estimate a pass without gradients, which has three fp32 tensors of log-probabilities and entropy."""
    tokens, width = max(config.train.forward_tokens, longest_part(config)), 2 if half(config) else 4
    terms = {"forward activations": forward_work(shape, tokens, width)}
    if head and config.ds.fp32_lm_head and half(config):
        terms["fp32 head"] = 4 * shape.head
    return terms | _any_pass(config, shape, head, cut, tokens, 12)


def _any_pass(config: Config, shape: ModelShape, head: bool, cut: bool, tokens: int, each: int) -> dict[str, int]:
    """Estimate the logits, with `each` bytes for one, and the layers that ZeRO-3 gathers."""
    terms = {"logits": each * min(config.train.logprob_chunk_tokens, tokens) * shape.vocab} if head else {}
    if cut:
        elements, sizes = tensors(shape, head)
        terms["gathered layers"] = gathered(elements, max(sizes), half(config))
    return terms
