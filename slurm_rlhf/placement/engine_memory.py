"""Estimate the bytes of what samples: a vLLM engine, how many sequences its KV cache holds; or the actor's ranks."""

from __future__ import annotations

from dataclasses import dataclass

from slurm_rlhf.config.schema import Config
from slurm_rlhf.placement import trainer_memory as tm
from slurm_rlhf.placement.model_shape import ModelShape

BLOCK = 16  # tokens of a KV block on GPUs
VOCABULARY = 64  # vLLM pads the vocabulary to a multiple of it
GIB = 1 << 30
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


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Describe how vLLM groups layers: those of a group share the number of a block, groups share one pool."""

    layers: int  # in each group
    groups: tuple[int, ...]  # window of each group, 0: all tokens


def kv_layout(shape: ModelShape) -> KvLayout:
    """Group the layers as vLLM does. Source: `kv_cache_utils._get_kv_cache_groups_uniform_page_size`."""
    kinds = sorted(set(shape.windows))
    if len(kinds) == 1:
        return KvLayout(shape.layers, (kinds[0],))
    counts = [shape.windows.count(kind) for kind in kinds]
    size = max(counts) if max(counts) < 1.5 * min(counts) else min(counts)
    groups = tuple(kind for kind, count in zip(kinds, counts, strict=True) for _ in range(-(-count // size)))
    return KvLayout(size, groups)


def block_bytes(shape: ModelShape, tp: int, dtype: int, block: int = BLOCK) -> int:
    """Count the bytes of a KV block on one rank: `block` tokens in all layers of a group."""
    heads = max(1, shape.kv_heads // tp)
    return 2 * block * heads * shape.head_dim * dtype * kv_layout(shape).layers


def blocks_of_sequence(shape: ModelShape, length: int, in_flight: int, block: int = BLOCK) -> int:
    """Count the blocks that a sequence of `length` tokens needs, with `in_flight` tokens computed in one step.

    Source: vLLM, `FullAttentionSpec` and `SlidingWindowSpec.max_memory_usage_bytes`.
    """
    total = 0
    for window in kv_layout(shape).groups:
        held = min(window - 1 + in_flight, length) if window else length
        total += -(-held // block) + (1 if window else 0)
    return total


def profiled(shape: ModelShape, tp: int, dtype: int, tokens: int, sequences: int) -> int:
    """Estimate the bytes that vLLM reserves after a trial run of `tokens` and `sequences`; not measured.

    They hold the widest place of the MLP and the residual stream, or the fp32 logits of all sequences with the
    buffers of sampling.
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
    vllm, tp, tokens = config.vllm, config.vllm.tensor_parallel_size, step_tokens(gpu)
    dtype = 4 if (config.ds.param_dtype if vllm.dtype == "auto" else vllm.dtype) == "fp32" else 2
    held = weights(shape, tp, dtype)
    work = profiled(shape, tp, dtype, tokens, vllm.max_num_seqs) + (TP_GROUP if tp > 1 else 0)
    graphs = 0 if vllm.enforce_eager else CUDA_GRAPHS
    kv = int(vllm.gpu_memory_utilization * gpu) - held - work - graphs
    block = block_bytes(shape, tp, dtype)
    blocks = max(0, kv // block)
    per_sequence = blocks_of_sequence(
        shape, config.data.max_len, 2 * tokens
    )  # a step may be prepared while another runs
    return EngineMemory(held, work, graphs, kv, block, blocks, blocks / per_sequence)


def step_tokens(gpu: int) -> int:
    """Return the tokens of one step of an offline engine. Source: vLLM, `EngineArgs.get_batch_defaults`."""
    return 16384 if gpu >= 70 * GIB else 8192


SCORES = 6
"""fp32 tensors of all logits of a step, at most: logits and a copy, log-probs, probabilities, noise, scores."""


def hf_terms(config: Config, shape: ModelShape, whole: bool) -> dict[str, int]:
    """Estimate the bytes of a batch of responses on ranks of the actor that sample themselves (rollout.engine = hf).

    `whole`: every rank has all parameters meanwhile.
    """
    half = config.ds.param_dtype != "fp32"
    width, rows = 2 if half else 4, config.rollout.hf_at_once(on_gpus=True)
    of_token = 2 * shape.kv_heads * shape.head_dim * width
    # A layer's keys and values are copied when a token is appended.
    cache = rows * config.data.max_len * of_token * (shape.layers + 1)
    longest = max(1, config.data.max_len - config.rollout.max_new_tokens)
    found = {
        "KV cache": cache,
        "activations of prompts": tm.forward_work(shape, rows * longest, width),
        "logits": SCORES * 4 * rows * shape.vocab,
    }
    if config.ds.zero_stage == 0 and half:
        found["16-bit weights"] = 2 * shape.parameters
    if config.ds.zero_stage == 3:
        largest = max(tensor.elements for tensor in shape.tensors)
        gathered = width * shape.parameters if whole else tm.gathered(shape.parameters, largest, half)
        found["gathered parameters"] = gathered
    return found
