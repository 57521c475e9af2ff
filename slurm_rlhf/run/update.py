"""The update of a step: mini-batches through actor and critic, and the metrics of their optimizer steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from slurm_rlhf.algorithms.batching import Shard, assemble, mini_batches
from slurm_rlhf.algorithms.registry import Algorithm
from slurm_rlhf.config.roles import ACTOR, CRITIC
from slurm_rlhf.config.schema import Config
from slurm_rlhf.records import F32, Experience
from slurm_rlhf.run.experience import fill_loss_weights, one_at_a_time
from slurm_rlhf.wire.calls import TrainAnswer, TrainBatch, TrainerCalls
from slurm_rlhf.wire.handles import RoleHandle, gather, send_shards

PER_STEP = ("lr", "grad_norm", "loss_scale", "skipped_steps")
"""Names of answers that are equal on all ranks: one number for the optimizer step, no sum over a rank's tokens."""

ADDED = ("nll_loss",)
"""Names of answers whose sum over the ranks is the number of the optimizer step."""


@dataclass(frozen=True, slots=True)
class Trained:
    """Holds the answers of a role to one optimizer step."""

    role: str
    tokens: float  # tokens of all ranks
    answers: list[dict[str, float]]  # one per rank
    rows: list[int] = field(default_factory=list)  # rows of the batch that it trained on
    logprobs: F32 | None = None  # log-probs of `rows` before the step; None: known before the update


def train(
    config: Config,
    algorithm: Algorithm,
    roles: Mapping[str, RoleHandle[Any]],
    experience: Experience,
    number: int,
    kl_coef: float,
) -> list[Trained]:
    """Pass mini-batches through actor and critic `train.max_epochs` times; the two train side by side.

    `number` is that of the step: it chooses the mini-batches, and whether the actor is still frozen.
    """
    settings = config.train
    frozen = (ACTOR,) if number <= config.critic.freezing_steps else ()
    trained = [role for role in (ACTOR, CRITIC) if role in roles and role not in frozen]
    pending: list[Callable[[], Trained]] = []
    for epoch in range(settings.max_epochs):
        for rows in mini_batches(len(experience), settings.batch_size, settings.seed * 1_000_003 + number, epoch):
            batch = experience.select(rows)
            # Every micro-batch on every rank divides by numbers of the whole optimizer step: an exact mean.
            tokens = float(batch.action_mask.sum())
            weighed = fill_loss_weights(config, algorithm, batch, kl_coef)
            for role in trained:
                request = partial(TrainBatch, denominator=weighed if role == ACTOR else tokens)
                parts, calls = send_shards(
                    roles[role], TrainerCalls.train_step, request, batch, settings.max_tokens_per_gpu
                )
                one_at_a_time(config, calls)
                pending.append(partial(_trained, role, tokens, rows, batch, parts, calls))
    return [wait() for wait in pending]


def _trained(
    role: str, tokens: float, rows: list[int], batch: Experience, parts: list[Shard], calls: list[Future[TrainAnswer]]
) -> Trained:
    """Wait for the ranks; `batch`: the rows of this step, of which each rank got a part."""
    answers = gather(calls)
    metrics, passed = [answer.metrics for answer in answers], None
    if columns := [answer.logprobs for answer in answers if answer.logprobs is not None]:
        passed = assemble(batch, parts, columns)
    return Trained(role, tokens, metrics, rows, passed)


def update_metrics(steps: list[Trained]) -> dict[str, float]:
    """Average over optimizer steps and their tokens; `first_ratio` and `first_approx_kl` are of the actor's first step.

    In that step the actor still has the weights of the old log-probs. Skipped steps are counted; they have no
    `grad_norm`, and their numbers that are not finite are left out.
    """
    found: dict[str, list[float]] = {}
    usable = [step for step in steps if not _spoiled(step)]
    for step in steps:
        for name in step.answers[0]:
            if name in PER_STEP:
                found.setdefault(f"{step.role}_{name}", []).append(step.answers[0][name])
            elif step in usable:
                found.setdefault(name, []).append(_per_token(step, name))
    first = next((step for step in usable if step.role == "actor"), None)
    metrics = {
        name: float(np.sum(values) if name.endswith("_skipped_steps") else np.mean(values))
        for name, values in found.items()
    }
    for name in ("ratio", "approx_kl"):
        if first and name in first.answers[0]:  # a loss of the user's may have other metrics
            metrics[f"first_{name}"] = _per_token(first, name)
    return metrics


def first_pass(steps: list[Trained]) -> tuple[list[int], F32] | None:
    """Find the actor's first usable step with log-probs of its own pass; return its rows and their log-probs."""
    known = ((step.rows, step.logprobs) for step in steps if step.logprobs is not None and not _spoiled(step))
    return next(known, None)


def _spoiled(step: Trained) -> bool:
    """Tell whether a step was skipped because its loss was not finite: its other numbers are useless, too."""
    answers = [value for answer in step.answers for value in answer.values()]
    return step.answers[0].get("skipped_steps", 0.0) > 0 and not np.isfinite(answers).all()


def skip_warning(metrics: dict[str, float]) -> str:
    """Warn of optimizer steps that were skipped because loss or gradient was not finite; empty: none was."""
    skipped = {role: int(metrics.get(f"{role}_skipped_steps", 0)) for role in ("actor", "critic")}
    counts = " and ".join(f"{count} of the {role}" for role, count in skipped.items() if count)
    return (
        f"optimizer steps skipped, because loss or gradient was not finite: {counts}. After train.max_skipped_steps in "
        "a row the run ends. Usually: a learning rate that is too high, or rewards out of range (reward.clip_range)"
        if counts
        else ""
    )


def _per_token(step: Trained, name: str) -> float:
    return sum(answer[name] for answer in step.answers) / (1.0 if name in ADDED else max(step.tokens, 1.0))
