"""A stage of training on a data set: `slurm-rlhf sft`, `rm` and `dpo`, with the trainers that PPO uses."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from slurm_rlhf.cluster.stop import FILE
from slurm_rlhf.config.check import stage_shares_problem
from slurm_rlhf.config.contents import model_contents
from slurm_rlhf.config.keys import get
from slurm_rlhf.config.schema import Config
from slurm_rlhf.config.schema_jobs import StageKeys
from slurm_rlhf.data.order import OrderKeys, PromptOrder
from slurm_rlhf.data.tokenizer import Tokenizer
from slurm_rlhf.errors import ConfigError, DataError
from slurm_rlhf.stages.examples import Examples, fingerprint, of_held_out
from slurm_rlhf.stages.kinds import StageTrainer, stage_trainer
from slurm_rlhf.stages.record import ELSEWHERE, StageRecord, StopSignals
from slurm_rlhf.trainer.distributed import join_world

PROGRESS_LINES = 40  # lines of a whole training, roughly


class StageInputs(NamedTuple):
    """Holds what a stage reads of the user's files."""

    examples: Examples
    held_out: Examples | None  # by which the model is measured
    order: PromptOrder
    steps: int


def read_inputs(config: Config, name: str) -> StageInputs:
    """Read the examples of a stage. Raises ModelError, DataError, also where they do not fill a batch."""
    keys: StageKeys = get(config, name)
    tokenizer, read = Tokenizer.load(config.actor.model_name_or_path), stage_trainer(config, name).read
    examples = read(Path(keys.dataset), tokenizer, config.data)
    held_out = read(Path(keys.eval_dataset), tokenizer, of_held_out(config.data)) if keys.eval_dataset else None
    count, batch = len(examples), keys.batch_size
    if count < batch:
        raise DataError(f"{keys.dataset}: {count} usable examples, fewer than {name}.batch_size = {batch}: lower it")
    shuffle, seed = config.data.shuffle, config.train.seed
    called = OrderKeys(*(f"{name}.{key}" for key in OrderKeys("dataset", "batch_size", "output_dir")))
    order = PromptOrder(count, batch, keys.max_epochs, seed, shuffle, fingerprint(examples), called)
    return StageInputs(examples, held_out, order, min(order.total, keys.max_steps or order.total))


def train_stage(config: Config, name: str) -> int:
    """Train actor.model_name_or_path on the data set of the stage `name`, and write the result to its output_dir.

    One process, or as many ranks as torchrun started. Betas, clipping, weight decay and warm-up are the actor's.
    Metrics, a log, and while it trains the checkpoint to go on from are in <output_dir>.run. SIGTERM, SIGUSR1 or Ctrl-C
    end it after the step in progress, with a checkpoint. Returns the exit code.
    Raises ConfigError, DataError, ModelError, CheckpointError, RunError; output_dir exists only after success.
    """
    out = Path(get(config, f"{name}.output_dir"))
    if config.train.threads_per_rank:
        torch.set_num_threads(config.train.threads_per_rank)
    world = join_world(config.timeout.collective, config.timeout.connect)
    examples, held_out, order, steps = read_inputs(config, name)
    for problem in stage_shares_problem(config, name, world.size):
        raise ConfigError(problem)
    record = StageRecord(name, config, world)
    model = config.actor.model_name_or_path
    checkpoint, state = record.begin(steps, {model: model_contents(Path(model))}, order)
    record.say(f"{len(examples)} examples, {len(examples.dropped)} dropped as too long, {steps} steps")
    if world.rank == 0 and (twice := len(examples) - len(set(examples.contents()))):
        record.say(f"warning: examples that are equal to earlier ones: {twice} (`slurm-rlhf data` shows some of them)")
    trainer = stage_trainer(config, name)(config, steps)
    done = state.get("step", 0)
    with StopSignals() as signals, record:
        prepared = all(trainer.prepare(each, record, signals) for each in (examples, held_out) if each)
        if prepared and checkpoint:
            trainer.load(checkpoint / name)
            record.say(f"resuming from {checkpoint} at step {done}/{steps}")
        if prepared:
            measured_by = held_out or (examples if trainer.measures_always else None)
            done = _train(trainer, examples, measured_by, order, record, signals, done, steps)
    if done < steps:
        reason = FILE if record.asked else signals.reason or ELSEWHERE
        saved = f"saved at step {done}/{steps}" if prepared else "the reference's log-probs so far are kept"
        record.say(f"stopped by {reason.what}; {saved}; the same command goes on from here")
        record.stopped(done)
        return reason.exit_code
    trainer.export_hf(out)
    record.finished()
    record.say(f"wrote {out}")
    return 0


def _train(
    trainer: StageTrainer,
    examples: Examples,
    measured_by: Examples | None,
    order: PromptOrder,
    record: StageRecord,
    signals: StopSignals,
    done: int,
    steps: int,
) -> int:
    """Train the steps after `done`; return the last one, which is saved if it is not the end."""
    start = time.monotonic()
    keys: StageKeys = get(trainer.config, trainer.name)
    for step in range(done + 1, steps + 1):
        began = time.monotonic()
        batch = examples.experience.select(examples.rows(order.next() or []))
        denominator = trainer.denominator(batch)
        metrics = trainer.train_step(batch, trainer.micro_batches(batch, examples), denominator)
        of_step = {name: metrics.pop(name) for name in ("lr", "grad_norm") if name in metrics}
        # A signal may reach one rank first: all of them stop after the same step.
        asked = signals.reason is not None or (trainer.world.rank == 0 and record.asked)
        total = torch.tensor([*metrics.values(), float(asked)], dtype=torch.float32, device=trainer.world.device)
        dist.all_reduce(total)
        *sums, stopped = total.tolist()
        means = {name: value / denominator for name, value in zip(metrics, sums, strict=True)}
        seconds, tokens = time.monotonic() - began, float(batch.action_mask.sum())
        row = means | {"lr": of_step["lr"], "grad_norm": of_step.get("grad_norm", math.nan), "tokens": tokens}
        row["perf/tokens_per_s"] = float(batch.lengths.sum()) / seconds
        if measured_by and (step == steps or (keys.eval_steps and step % keys.eval_steps == 0)):
            row |= _measured(trainer, measured_by, record, "" if keys.eval_dataset else " that it was trained on")
        record.step(step, {**row, "time/step": time.monotonic() - began})
        if step % math.ceil(steps / PROGRESS_LINES) == 0 or step in (1, steps):
            shown = " ".join(f"{name} {value:.4f}" for name, value in means.items())
            record.say(
                f"step {step}/{steps} {shown} lr {row['lr']:.2e} grad_norm {row['grad_norm']:.3f} "
                f"{time.monotonic() - start:.1f} s"
            )
        due = keys.save_steps and step % keys.save_steps == 0
        if (due or stopped) and step < steps:
            record.save(step, steps, order.state_dict(), trainer.save)
            if stopped:
                return step
    return steps


def _measured(trainer: StageTrainer, examples: Examples, record: StageRecord, which: str) -> dict[str, float]:
    """Measure the model, say what comes of it, and return it as metrics."""
    began = time.monotonic()
    found = trainer.measured(examples)
    shown = ", ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in found.items())
    record.say(f"measured by {len(examples)} examples{which}: {shown}")
    return {**{f"eval/{name}": value for name, value in found.items()}, "time/eval": time.monotonic() - began}
