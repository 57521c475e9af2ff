"""The actor's update against a bare DeepSpeed and transformers loop: same sequences, same process, in turns."""

from __future__ import annotations

import os
import socket
from typing import Any, cast

import numpy as np

from slurm_rlhf.algorithms.batching import shards
from slurm_rlhf.bench.baseline_train import BareTrainer
from slurm_rlhf.bench.compare import race
from slurm_rlhf.config.schema import Config
from slurm_rlhf.control.calls import StartRequest, TrainBatch
from slurm_rlhf.control.client import ControlClient
from slurm_rlhf.errors import RunError
from slurm_rlhf.placement.flops import batch_flops, mfu
from slurm_rlhf.placement.gpus import find_gpu
from slurm_rlhf.placement.model_shape import ModelShape, read_shape
from slurm_rlhf.records import Experience
from slurm_rlhf.workers.model_workers import ActorWorker
from slurm_rlhf.workers.worker import RankInfo

LOSS_TOLERANCE = {"fp32": 1e-4, "bf16": 1e-2}


def bench_train(config: Config, sequences: int, prompt_tokens: int, repeats: int) -> dict[str, Any]:
    """Tokens/s (prompt and response, without padding) of both sides, on sequences of equal and of different lengths.

    A response has rollout.max_new_tokens tokens; in the ragged batch between a sixteenth of that and all of it. The
    bare loop's micro-batch is as many of the longest sequences as fit into train.max_tokens_per_gpu, so both sides
    have the same peak of memory. Raises RunError when the losses of the two differ: they would not do the same.
    """
    longest = prompt_tokens + config.rollout.max_new_tokens
    micro = max(1, config.train.max_tokens_per_gpu // longest)
    role = ActorWorker(config, RankInfo("actor", 0, 1, 0, socket.gethostname()), cast(ControlClient, None))
    role.start(StartRequest(total_steps=1))
    bare = BareTrainer(config, micro)
    shape, gpu = read_shape("actor.model_name_or_path", config.actor.model_name_or_path), _gpu()
    result: dict[str, Any] = {"bench": "train", "unit": "tokens/s", "gpu": gpu}
    for name, shortest in (("equal", config.rollout.max_new_tokens), ("ragged", config.rollout.max_new_tokens // 16)):
        batch = _batch(config, sequences, prompt_tokens, max(1, shortest), role)
        timed = _compare(config, role, bare, batch, repeats)
        result[name] = timed | utilisation(shape, batch, timed["ours"], config.ds.param_dtype, gpu)
    return result | {
        "sequences": sequences,
        "longest": longest,
        "micro_batch": micro,
        "max_tokens_per_gpu": config.train.max_tokens_per_gpu,
        "zero_stage": config.ds.zero_stage,
        "param_dtype": config.ds.param_dtype,
        "threads": int(os.environ.get("OMP_NUM_THREADS", "0")),
    }


def _compare(config: Config, role: ActorWorker, bare: BareTrainer, batch: Experience, repeats: int) -> dict[str, Any]:
    denominator = float(batch.action_mask.sum())
    losses: dict[str, float] = {}

    def ours(number: int) -> int:
        (part,) = shards(batch, 1, config.train.max_tokens_per_gpu)
        answer = role.train_step(TrainBatch(part.experience, part.micro, denominator))
        losses.setdefault("ours", answer["policy_loss"] / denominator)
        return int(batch.lengths.sum())

    def plain(number: int) -> int:
        losses.setdefault("bare", bare.train_step(batch, denominator))
        return int(batch.lengths.sum())

    timed = race(ours, plain, repeats).to_json()
    if abs(losses["ours"] - losses["bare"]) > LOSS_TOLERANCE[config.ds.param_dtype]:
        raise RunError(f"first losses {losses['ours']:.6f} (ours) and {losses['bare']:.6f} (bare): not the same work")
    return timed | {"tokens": int(batch.lengths.sum()), "micro_batches": len(_micros(config, batch))}


def utilisation(shape: ModelShape, batch: Experience, rate: float, dtype: str, gpu: str) -> dict[str, float | None]:
    """`tflops`: model FLOPs per second of an update of `batch` at `rate` tokens/s, without recomputation. `mfu`: their
    share of the peak that `gpu` has by name, in bf16; None where no peak is known, and in fp32."""
    tokens = int(batch.lengths.sum())
    flops = batch_flops(shape, batch.lengths.tolist(), backward=True, head_tokens=len(batch.action_mask))
    seconds = tokens / rate
    known = find_gpu(gpu) if dtype == "bf16" else None
    share = mfu(flops, seconds, 1, known.bf16_tflops) if known else 0.0
    return {"tflops": flops / seconds / 1e12, "mfu": share or None}


def _gpu() -> str:
    """The name of this process's GPU; empty without one."""
    import torch

    return str(torch.cuda.get_device_name()) if torch.cuda.is_available() else ""


def _micros(config: Config, batch: Experience) -> list[list[int]]:
    return shards(batch, 1, config.train.max_tokens_per_gpu)[0].micro


def _batch(config: Config, sequences: int, prompt_tokens: int, shortest: int, role: ActorWorker) -> Experience:
    """Random tokens; lengths as if drawn between the shortest and the longest; old log-probs from the actor."""
    dice = np.random.default_rng(0)
    vocab = role.trainer.engine.module.model.config.vocab_size
    prompts = np.full(sequences, prompt_tokens, dtype=np.int32)
    responses = dice.integers(shortest, config.rollout.max_new_tokens + 1, sequences).astype(np.int32)
    actions = int(responses.sum())
    batch = Experience(
        prompts,
        responses,
        dice.integers(1, vocab, int(prompts.sum()) + actions).astype(np.int32),
        np.ones(actions, dtype=np.bool_),
        np.zeros(sequences, dtype=np.float32),
        {"advantages": dice.standard_normal(actions).astype(np.float32)},
    )
    batch.columns["logprobs"] = role.trainer.logprobs(batch, _micros(config, batch))["logprobs"]
    return batch
