"""Supervised fine-tuning (`slurm-rlhf sft`): examples from a JSONL file, and the trainer that PPO uses."""

from __future__ import annotations

import hashlib
import itertools
import math
import shutil
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from slurm_rlhf.algorithms.batching import cut_batch
from slurm_rlhf.algorithms.losses import Metrics
from slurm_rlhf.checkpoint.directory import CheckpointDir
from slurm_rlhf.config.schema import Config, Data
from slurm_rlhf.config.text import dump_toml
from slurm_rlhf.data.order import PromptOrder
from slurm_rlhf.data.prompts import PromptSet
from slurm_rlhf.data.rows import Row, cell, read_rows
from slurm_rlhf.data.tokenizer import Tokenizer, continuations
from slurm_rlhf.errors import CheckpointError, ConfigError, DataError, printable
from slurm_rlhf.observe.metrics import MetricsLog
from slurm_rlhf.records import Experience
from slurm_rlhf.run_directory import RunDirectory
from slurm_rlhf.trainer.distributed import World, join_world
from slurm_rlhf.trainer.train_settings import Schedule
from slurm_rlhf.trainer.trainers import LanguageModelTrainer

PROGRESS_LINES = 40  # about so many
ROLE = "sft"
"""Directory of the model's state in a checkpoint."""


@dataclass(slots=True)
class Examples:
    """Prompts and answers as packed experience."""

    experience: Experience  # the answers, each with the end-of-sequence token, are the responses
    dropped: int  # longer than data.max_len


def load_examples(path: Path, tokenizer: Tokenizer, data: Data) -> Examples:
    """Load the rows' `data.input_key` and `data.output_key`; prompts are tokenized as PPO's prompts are.

    Raises DataError with file and line for a row that is not an example, and when none is left.
    """
    answers = [_answer(row, where, data) for where, row in read_rows(path, data.max_samples)]
    prompts = PromptSet.load(path, tokenizer, data, data.max_len - 1, data.max_samples)
    texts = [answers[prompt.index] for prompt in prompts]
    continued = continuations(list(prompts), texts, tokenizer, data.apply_chat_template)
    responses = [[*ids, tokenizer.eos_token_id] for ids in continued]
    kept = [
        (prompt.token_ids, np.asarray(response, dtype=np.int32))
        for prompt, response in zip(prompts, responses, strict=True)
        if len(prompt.token_ids) + len(response) <= data.max_len
    ]
    if not kept:
        raise DataError(f"{path}: every example is longer than data.max_len = {data.max_len} tokens: raise it")
    experience = Experience(
        np.array([len(prompt) for prompt, _ in kept], dtype=np.int32),
        np.array([len(response) for _, response in kept], dtype=np.int32),
        np.concatenate([part for pair in kept for part in pair]),
        np.ones(sum(len(response) for _, response in kept), dtype=np.bool_),
        np.zeros(len(kept), dtype=np.float32),
    )
    return Examples(experience, len(answers) - len(kept))


def _answer(row: Row, where: str, data: Data) -> str:
    value = cell(row, data.output_key, "data.output_key", where)
    if not isinstance(value, str):
        raise DataError(f"{where}: {data.output_key!r} must be a string, got {type(value).__name__}")
    return value


def fine_tune(config: Config) -> int:
    """Train actor.model_name_or_path on sft.dataset and write the result to sft.output_dir.

    One process, or as many ranks as torchrun started. Betas, clipping, weight decay and warm-up are the actor's.
    Metrics, a log, and while it trains the checkpoint to go on from are in <sft.output_dir>.run. SIGTERM, SIGUSR1 or
    Ctrl-C end it after the step in progress, with a checkpoint. Returns the exit code.
    Raises ConfigError, DataError, ModelError, CheckpointError, RunError; sft.output_dir exists only after success.
    """
    out = Path(config.sft.output_dir)
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ConfigError(
            f"sft.output_dir: {out} is there already and is not empty. Remove it or name another directory."
        )
    if config.train.threads_per_rank:
        torch.set_num_threads(config.train.threads_per_rank)
    tokenizer = Tokenizer.load(config.actor.model_name_or_path)
    examples = load_examples(Path(config.sft.dataset), tokenizer, config.data)
    world = join_world(config.timeout.collective, config.timeout.connect)
    order = _order(config, examples, world)
    steps = min(order.total, config.sft.max_steps or order.total)
    record = SftRecord(config, world)
    checkpoint, state = record.begin(steps)
    if checkpoint:
        order.load_state_dict(state["order"])
    record.say(f"{len(examples.experience)} examples, {examples.dropped} dropped as too long, {steps} steps")
    trainer = SftTrainer(config, steps)
    if checkpoint:
        trainer.load(checkpoint / ROLE)
        record.say(f"resuming from {checkpoint} at step {state['step']}/{steps}")
    with StopSignals() as signals:
        done = _train(trainer, examples.experience, order, record, signals, state.get("step", 0), steps)
    if done < steps:
        record.say(
            f"stopped by {words_of(signals.number)}; saved at step {done}/{steps}; the same command goes on from here"
        )
        return exit_code(signals.number)
    trainer.export_hf(out)
    record.finished()
    record.say(f"wrote {out}")
    return 0


def _order(config: Config, examples: Examples, world: World) -> PromptOrder:
    batch, groups = config.sft.batch_size, world.size // config.ds.ulysses_size
    if groups and batch % groups:
        shared = f" in groups of ds.ulysses_size = {config.ds.ulysses_size}" if groups < world.size else ""
        raise ConfigError(
            f"sft.batch_size = {batch} does not divide over {world.size} ranks{shared}: use a multiple of {groups}"
        )
    count = len(examples.experience)
    if count < batch:
        raise DataError(f"{config.sft.dataset}: {count} usable examples, fewer than sft.batch_size = {batch}: lower it")
    tokens = examples.experience.token_ids
    fingerprint = hashlib.sha256(tokens.tobytes() + examples.experience.response_lens.tobytes()).hexdigest()
    return PromptOrder(count, batch, config.sft.max_epochs, config.train.seed, config.data.shuffle, fingerprint)


class SftTrainer(LanguageModelTrainer):
    """Trains the answers of examples on one rank."""

    def __init__(self, config: Config, total_steps: int) -> None:
        super().__init__(config, Schedule.of(config, config.sft.learning_rate, total_steps, kind="cosine"))

    def _loss(self, part: Experience, denominator: float) -> tuple[Tensor, Metrics]:
        """Sum the cross-entropy of this micro-batch's answers, divided by the answer tokens of the whole step."""
        batch = self._collate(part)
        logprobs, _ = self.backend.forward(batch.input_ids, batch.action_index, batch.targets, row=batch.row)
        total = -batch.whole(logprobs).sum()
        return total / denominator, {"loss": total.detach()}


def _train(
    trainer: SftTrainer,
    examples: Experience,
    order: PromptOrder,
    record: SftRecord,
    signals: StopSignals,
    done: int,
    steps: int,
) -> int:
    """Train the steps behind `done`; return the last one, which is saved if it is not the end."""
    start = time.monotonic()
    world, config = trainer.world, trainer.config
    for step in range(done + 1, steps + 1):
        began = time.monotonic()
        batch = examples.select(order.next() or [])
        tokens = float(batch.response_lens.sum())
        lengths, layout = batch.lengths.tolist(), trainer.layout
        _, micros = cut_batch(lengths, world.size, config.train.max_tokens_per_gpu, layout)
        micro = micros[world.rank // layout.ranks]
        metrics = trainer.train_step(batch, micro, tokens)
        # Which rank has a signal first is chance: all of them stop behind the same step.
        summed, stopped = _sum_over_ranks([metrics["loss"], float(signals.number > 0)], world)
        loss = summed / tokens
        grad_norm, seconds = metrics.get("grad_norm", math.nan), time.monotonic() - began
        row = {"loss": loss, "lr": metrics["lr"], "grad_norm": grad_norm, "tokens": tokens}
        record.step(step, {**row, "time/step": seconds, "perf/tokens_per_s": float(batch.lengths.sum()) / seconds})
        if step % math.ceil(steps / PROGRESS_LINES) == 0 or step in (1, steps):
            record.say(
                f"step {step}/{steps} loss {loss:.4f} lr {metrics['lr']:.2e} grad_norm {grad_norm:.3f} "
                f"{time.monotonic() - start:.1f} s"
            )
        due = config.sft.save_steps and step % config.sft.save_steps == 0
        if (due or stopped) and step < steps:
            record.save(step, steps, order.state_dict(), trainer.save)
            if stopped:
                return step
    return steps


def _sum_over_ranks(values: list[float], world: World) -> list[float]:
    total = torch.tensor(values, dtype=torch.float32, device=world.device)
    dist.all_reduce(total)
    return [float(value) for value in total]


class SftRecord:
    """Writes metrics, a log and, until the model is written, checkpoints to `<sft.output_dir>.run`.

    Rank 0 writes; `save` is collective.
    """

    def __init__(self, config: Config, world: World) -> None:
        self._config = config
        self._world = world
        out = Path(config.sft.output_dir)
        self._paths = RunDirectory(out.with_name(f"{out.name}.run"))
        self._checkpoints = CheckpointDir(self._paths.root)
        self._metrics = MetricsLog(self._paths.metrics)

    def begin(self, steps: int) -> tuple[Path | None, dict[str, Any]]:
        """Return the checkpoint to go on from, by the key `resume`, and its state; (None, {}) at the beginning.

        Metrics of an earlier start that has left no checkpoint are put aside. Raises CheckpointError.
        """
        checkpoint = self._checkpoints.resolve(self._config.resume)
        state = self._checkpoints.load_state(checkpoint, [ROLE]) if checkpoint else {}
        if state and state["steps"] != steps:
            raise CheckpointError(
                f"{checkpoint} is of a training of {state['steps']} steps, and this one has {steps}: the learning rate "
                "follows their number. Restore sft.max_steps, sft.max_epochs and the examples, or add --resume=never"
            )
        self._together()  # all have read before anything is written
        if self._world.rank == 0:
            self._paths.root.mkdir(parents=True, exist_ok=True)
            self._paths.config.write_text(dump_toml(self._config), encoding="utf-8")
            if checkpoint is None:
                self._put_aside()
            self._metrics.truncate_after(state.get("step", 0))
        return checkpoint, state

    def _together(self) -> None:
        if self._world.size > 1:
            dist.barrier()

    def _put_aside(self) -> None:
        paths, metrics = self._paths, self._paths.metrics
        if metrics.exists():
            metrics.rename(next(free for n in itertools.count(1) if not (free := paths.aside(metrics, n)).exists()))

    def say(self, text: str) -> None:
        """Print a line, and append it to the log. Rank 0 only; elsewhere nothing happens."""
        if self._world.rank:
            return
        print(f"sft: {printable(text)}", flush=True)
        if self._paths.root.is_dir():
            with (self._paths.root / "sft.log").open("a", encoding="utf-8") as file:
                file.write(f"{text}\n")

    def step(self, step: int, metrics: dict[str, float]) -> None:
        """Write the metrics of a step."""
        if self._world.rank == 0:
            self._metrics.append(step, metrics)

    def save(self, step: int, steps: int, order: dict[str, Any], write: Callable[[Path], object]) -> None:
        """Save a checkpoint, in place of the one before; `write` is called on each rank with the same directory."""
        if self._world.rank == 0:
            (self._checkpoints.begin(step) / ROLE).mkdir()
        self._together()
        write(self._checkpoints.of(step).with_suffix(".tmp") / ROLE)
        if self._world.rank == 0:
            self._checkpoints.commit(step, {"step": step, "steps": steps, "order": order})
            self._checkpoints.prune(1)

    def finished(self) -> None:
        """Remove the checkpoints: the model is written."""
        if self._world.rank == 0:
            shutil.rmtree(self._paths.checkpoints, ignore_errors=True)


WORDS = {
    signal.SIGTERM: "SIGTERM",
    signal.SIGINT: "Ctrl-C",
    signal.SIGUSR1: "SIGUSR1: the end of the allocation is near",
}


class StopSignals:
    """Remembers the first signal, inside a `with` block; a second one has its usual effect."""

    def __init__(self) -> None:
        self.number = 0
        """Number of the signal that has come; 0: none."""
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._came) for number in WORDS}
        return self

    def _came(self, number: int, frame: FrameType | None) -> None:
        self.number = number
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._restore()


def words_of(number: int) -> str:
    """Say which signal it was; another rank may have had it."""
    return WORDS.get(signal.Signals(number), "a signal") if number else "a signal to another rank"


def exit_code(number: int) -> int:
    """Return the exit code of a training that was stopped: that of `slurm-rlhf train`, 0 where the allocation ends."""
    return 0 if number == signal.SIGUSR1 else 128 + (number or signal.SIGTERM)
