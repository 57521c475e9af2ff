"""Measure for `slurm-rlhf bench train`: the actor's update and a bare DeepSpeed loop, in turns."""

from __future__ import annotations

import os
import socket
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from slurm_rlhf.algorithms.batching import shards
from slurm_rlhf.bench.compare import compare, table, with_model
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import RunError
from slurm_rlhf.placement.gpus import find_gpu
from slurm_rlhf.placement.model_shape import ModelShape, batch_flops, mfu, read_shape
from slurm_rlhf.ranks.model_workers import ActorWorker
from slurm_rlhf.ranks.worker import RankInfo
from slurm_rlhf.records import Experience
from slurm_rlhf.trainer._deepspeed import import_deepspeed
from slurm_rlhf.trainer.deepspeed import deepspeed_config
from slurm_rlhf.trainer.distributed import join_world
from slurm_rlhf.trainer.trainer import DTYPES, Schedule, TrainSettings
from slurm_rlhf.wire.calls import TrainBatch
from slurm_rlhf.wire.client import ControlClient

MEAN, SIGMA = 850 / 2048, 0.8
"""Log-normal lengths of ragged responses: mean, as a share of rollout.max_new_tokens; deviation of the logarithm."""
LOSS_TOLERANCE = {"fp32": 1e-4, "bf16": 1e-2, "fp16": 1e-2}


def run_bench(options: dict[str, Any], config: Config) -> dict[str, Any]:
    """Measure tokens/s (without padding) of both sides, on sequences of equal and of different lengths.

    A response of the equal batch has rollout.max_new_tokens tokens. Those of the ragged batch have log-normal lengths
    (`MEAN`, `SIGMA`: as in runs on mathematics), cut at that number. The bare loop's micro-batch has as many of the
    longest sequences as fit into train.max_tokens_per_gpu, so both sides need the same memory. Raises RunError if the
    losses differ, because then the two sides do not do the same work; ConfigError, ModelError.
    """
    with with_model(options, config, mean_response=1):
        longest = options["prompt_tokens"] + config.rollout.max_new_tokens
        micro = max(1, config.train.max_tokens_per_gpu // longest)
        role = ActorWorker(config, RankInfo("actor", 0, 1, 0, socket.gethostname()), cast(ControlClient, None))
        role.start(1)
        baseline = BaselineTrainer(config, micro)
        shape = read_shape("actor.model_name_or_path", config.actor.model_name_or_path)
        gpu = str(torch.cuda.get_device_name()) if torch.cuda.is_available() else ""
        result: dict[str, Any] = {"bench": "train", "unit": "tokens/s", "gpu": gpu}
        for name in ("equal", "ragged"):
            batch = _batch(config, options["sequences"], options["prompt_tokens"], name == "ragged", role)
            timed = _compare(config, role, baseline, batch, options["repeats"])
            result[name] = timed | utilisation(shape, batch, timed["ours"], config.ds.param_dtype, gpu)
        return result | {
            "sequences": options["sequences"],
            "longest": longest,
            "micro_batch": micro,
            "max_tokens_per_gpu": config.train.max_tokens_per_gpu,
            "zero_stage": config.ds.zero_stage,
            "param_dtype": config.ds.param_dtype,
            "threads": int(os.environ.get("OMP_NUM_THREADS", "0")),
        }


def show(result: dict[str, Any]) -> str:
    """Format the results for a terminal."""
    rows = {name: result[name] for name in ("equal", "ragged")}
    mfu = {name: f" (MFU {row['mfu']:.1%})" if row["mfu"] else "" for name, row in rows.items()}  # 0: not known
    rates = [f"{name} {row['tflops']:.3g} TFLOP/s{mfu[name]}" for name, row in rows.items()]
    return (
        f"{table(rows, 'tokens/s')}\n"
        f"{result['sequences']} sequences of at most {result['longest']} tokens; micro-batches of at most "
        f"{result['max_tokens_per_gpu']} tokens, the bare loop's of {result['micro_batch']} sequences; "
        f"ZeRO-{result['zero_stage']}, {result['param_dtype']}\n"
        f"model FLOPs of ours, forward and backward, without recomputation: {', '.join(rates)}"
    )


def _compare(
    config: Config, role: ActorWorker, baseline: BaselineTrainer, batch: Experience, repeats: int
) -> dict[str, Any]:
    denominator = float(batch.action_mask.sum())
    losses: dict[str, float] = {}

    def ours(number: int) -> int:
        (part,) = shards(batch, 1, config.train.max_tokens_per_gpu, role.trainer.layout)
        answer = role.train_step(TrainBatch(part.experience, part.micro, denominator))
        losses.setdefault("ours", answer.metrics["policy_loss"] / denominator)
        return int(batch.lengths.sum())

    def plain(number: int) -> int:
        losses.setdefault("bare", baseline.train_step(batch, denominator))
        return int(batch.lengths.sum())

    timed = compare(ours, plain, repeats)
    if abs(losses["ours"] - losses["bare"]) > LOSS_TOLERANCE[config.ds.param_dtype]:
        raise RunError(f"first losses {losses['ours']:.6f} (ours) and {losses['bare']:.6f} (bare): not the same work")
    return timed | {"tokens": int(batch.lengths.sum()), "micro_batches": len(_micros(config, role, batch))}


def utilisation(shape: ModelShape, batch: Experience, rate: float, dtype: str, gpu: str) -> dict[str, float | None]:
    """Compute TFLOP/s of an update of `batch` at `rate` tokens/s, without recomputation, and its share of the peak.

    `mfu` is None in fp32, and if the peak of a GPU with the name `gpu` is not known.
    """
    tokens = int(batch.lengths.sum())
    flops = batch_flops(shape, batch.lengths.tolist(), backward=True, head_tokens=len(batch.action_mask))
    seconds = tokens / rate
    known = find_gpu(gpu) if dtype == "bf16" else None
    share = mfu(flops, seconds, 1, known.bf16_tflops) if known else 0.0
    return {"tflops": flops / seconds / 1e12, "mfu": share or None}


def _micros(config: Config, role: ActorWorker, batch: Experience) -> list[list[int]]:
    return shards(batch, 1, config.train.max_tokens_per_gpu, role.trainer.layout)[0].micro


def _batch(config: Config, sequences: int, prompt_tokens: int, ragged: bool, role: ActorWorker) -> Experience:
    """Make sequences of random tokens with random lengths, and compute their old log-probs with the actor."""
    dice = np.random.default_rng(0)
    vocab = role.trainer.backend.module.model.config.vocab_size
    prompts = np.full(sequences, prompt_tokens, dtype=np.int32)
    longest = config.rollout.max_new_tokens
    drawn = MEAN * longest * dice.lognormal(-(SIGMA**2) / 2, SIGMA, sequences)
    responses = (np.clip(drawn, 1, longest) if ragged else np.full(sequences, longest)).astype(np.int32)
    actions = int(responses.sum())
    batch = Experience(
        prompts,
        responses,
        dice.integers(1, vocab, int(prompts.sum()) + actions).astype(np.int32),
        np.ones(actions, dtype=np.bool_),
        np.zeros(sequences, dtype=np.float32),
        {"advantages": dice.standard_normal(actions).astype(np.float32)},
    )
    batch.columns["logprobs"] = role.trainer.logprobs(batch, _micros(config, role, batch))["logprobs"]
    return batch


class BaselineTrainer:
    """Train as a script does: a transformers model in `deepspeed.initialize`, padded micro-batches of a fixed size."""

    def __init__(self, config: Config, micro_batch: int) -> None:
        """Load the model, with the optimizer, ZeRO stage and precision of `PolicyTrainer`.

        `micro_batch`: sequences in a micro-batch.
        """
        from transformers import AutoModelForCausalLM

        self.world = join_world(config.timeout.collective, config.timeout.connect)
        self.micro_batch = micro_batch
        self.clip, self.temperature = config.actor.eps_clip, config.rollout.temperature
        model: Any = AutoModelForCausalLM.from_pretrained(
            config.actor.model_name_or_path,
            dtype=DTYPES[config.ds.param_dtype],
            attn_implementation=config.ds.attn_implementation,
        )
        if config.checkpointing == "full":
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
        engine = TrainSettings(config, Schedule.of(config, config.actor.learning_rate, 1), self.world.size)
        first, second = config.actor.adam_betas
        optimizer = torch.optim.AdamW(model.parameters(), lr=engine.schedule.peak, betas=(first, second))
        settings = deepspeed_config(engine, sum(p.numel() for p in model.parameters()), self.world.size)
        self.engine, *_ = import_deepspeed(self.world.device).initialize(
            model=model, optimizer=optimizer, config=settings
        )

    def train_step(self, exp: Experience, denominator: float) -> float:
        """Take one optimizer step over all sequences of `exp`, in their order; return the loss."""
        losses: list[Tensor] = []
        starts = range(0, len(exp), self.micro_batch)
        for start in starts:
            rows = list(range(start, min(start + self.micro_batch, len(exp))))
            loss = self._loss(exp.select(rows), denominator)
            self.engine.set_gradient_accumulation_boundary(start == starts[-1])
            self.engine.backward(loss)
            losses.append(loss.detach())
        self.engine.step()
        return float(torch.stack(losses).sum())  # waits for the step, too

    def _loss(self, part: Experience, denominator: float) -> Tensor:
        # Padded token ids and their mask are [B, L]; actions, where the policy sampled the next token, [B, L - 1].
        lengths, prompts = (torch.from_numpy(each)[:, None] for each in (part.lengths, part.prompt_lens))
        place = torch.arange(int(lengths.max()))
        known = place < lengths
        padded = torch.zeros(known.shape, dtype=torch.int64)
        padded[known] = torch.from_numpy(part.token_ids).long()
        parts = (padded, known.long(), (known & (place >= prompts))[:, 1:])
        input_ids, attention, actions = (each.to(self.world.device) for each in parts)
        old, advantages = (_spread(part.columns[name], actions) for name in ("logprobs", "advantages"))
        logits = self.engine(input_ids=input_ids, attention_mask=attention, use_cache=False).logits
        log_p = torch.log_softmax(logits[:, :-1].float() / self.temperature, dim=-1)
        logprobs = log_p.gather(-1, input_ids[:, 1:, None]).squeeze(-1)
        ratio = (logprobs - old).exp()
        clipped = ratio.clamp(1 - self.clip, 1 + self.clip)
        loss = -torch.minimum(ratio * advantages, clipped * advantages)
        return torch.where(actions, loss, 0).sum() / denominator


def _spread(column: Any, actions: Tensor) -> Tensor:
    """Unpack a column to [B, L - 1], with zeros where there is no action."""
    spread = torch.zeros(actions.shape, dtype=torch.float32)
    spread[actions.cpu()] = torch.from_numpy(column)
    return spread.to(actions.device)
