"""`slurm-rlhf sft`: supervised fine-tuning, with the modules and the engine that PPO trains with."""

from __future__ import annotations

import dataclasses
import math
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from slurm_rlhf.algorithms.batching import micro_batches, split_ranks
from slurm_rlhf.algorithms.losses import Metrics
from slurm_rlhf.config.schema import Config
from slurm_rlhf.data.order import PromptOrder
from slurm_rlhf.data.tokenizer import Tokenizer
from slurm_rlhf.errors import ConfigError, DataError
from slurm_rlhf.records import Experience
from slurm_rlhf.training.collate import collate
from slurm_rlhf.training.deepspeed_engine import EngineConfig, loading
from slurm_rlhf.training.distributed import World, join_world, seed_rank
from slurm_rlhf.training.engine import TrainEngine
from slurm_rlhf.training.examples import load_examples
from slurm_rlhf.training.export import save_hf
from slurm_rlhf.training.models import load_policy
from slurm_rlhf.training.step import optimizer_step

LINES = 40  # of progress, about


def run(config: Config) -> None:
    """Train actor.model_name_or_path on sft.dataset and write the result to sft.output_dir.

    One process, or as many ranks as torchrun started. Betas, clipping, weight decay and warm-up are the actor's.
    Raises ConfigError, DataError, ModelError, RunError; sft.output_dir exists only after success.
    """
    out = Path(config.sft.output_dir)
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ConfigError(f"sft.output_dir: {out} is there already and not empty. Remove it or name another directory.")
    if config.train.threads_per_rank:
        torch.set_num_threads(config.train.threads_per_rank)
    tokenizer = Tokenizer.load(config.actor.model_name_or_path)
    examples = load_examples(Path(config.sft.dataset), tokenizer, config.data)
    world = join_world(config.timeout.collective)
    order = _order(config, len(examples.experience), world)
    steps = min(order.total, config.sft.max_steps or order.total)
    _say(world, f"{len(examples.experience)} examples, {examples.dropped} dropped as too long, {steps} steps")
    seed_rank(config.train.seed, world.rank, config.train.full_determinism)
    engine = _engine(config, steps, world)
    _train(config, engine, examples.experience, order, steps)
    save_hf(engine.module.model, Path(config.actor.model_name_or_path), out, world.rank)
    _say(world, f"wrote {out}")


def _say(world: World, text: str) -> None:
    if world.rank == 0:
        print(f"sft: {text}", flush=True)


def _order(config: Config, examples: int, world: World) -> PromptOrder:
    batch = config.sft.batch_size
    if batch % world.size:
        raise ConfigError(f"sft.batch_size = {batch} does not divide over {world.size} ranks: use a multiple of it")
    if examples < batch:
        raise DataError(
            f"{config.sft.dataset}: {examples} usable examples, fewer than sft.batch_size = {batch}: lower it"
        )
    return PromptOrder(examples, batch, config.sft.max_epochs, config.train.seed, config.data.shuffle)


def _engine(config: Config, steps: int, world: World) -> TrainEngine:
    with loading(config.ds, world) as ds:
        module = load_policy(
            config.actor.model_name_or_path,
            ds,
            config.train.logprob_chunk_tokens,
            config.actor.gradient_checkpointing_enable,
            max_len=config.data.max_len,
        )
    cfg = EngineConfig.of_actor(config, config.sft.learning_rate, steps)
    return TrainEngine(
        module, dataclasses.replace(cfg, schedule=dataclasses.replace(cfg.schedule, kind="cosine")), world
    )


def _train(config: Config, engine: TrainEngine, examples: Experience, order: PromptOrder, steps: int) -> None:
    start = time.monotonic()
    for step in range(1, steps + 1):
        batch = examples.select(order.next() or [])
        tokens = float(batch.response_lens.sum())
        lengths = batch.lengths.tolist()
        per_rank = split_ranks(lengths, engine.world.size)
        micro = micro_batches(per_rank, lengths, config.train.max_tokens_per_gpu)[engine.world.rank]
        metrics = optimizer_step(engine, batch, micro, partial(_loss, engine, tokens))
        if step % math.ceil(steps / LINES) == 0 or step in (1, steps):
            loss = _sum_over_ranks(metrics["loss"], engine.world) / tokens
            _say(
                engine.world,
                f"step {step}/{steps} loss {loss:.4f} lr {metrics['lr']:.2e} grad_norm {metrics['grad_norm']:.3f} "
                f"{time.monotonic() - start:.1f} s",
            )


def _loss(engine: TrainEngine, tokens: float, part: Experience) -> tuple[Tensor, Metrics]:
    """Cross-entropy of the answers, a sum over this micro-batch divided by the answer tokens of the whole step."""
    batch = collate(part, engine.world.device)
    logprobs, _ = engine(batch.input_ids, batch.action_index, batch.targets)
    total = -logprobs.sum()
    return total / tokens, {"loss": total.detach()}


def _sum_over_ranks(value: float, world: World) -> float:
    total = torch.tensor(value, dtype=torch.float32, device=world.device)
    dist.all_reduce(total)
    return float(total)
