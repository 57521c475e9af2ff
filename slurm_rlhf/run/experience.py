"""Fill the columns that an update needs: log-probs and values by the roles, advantages and weights here.

`TrainingStep.collect` calls these in turn. `fill_advantages` and `fill_correction` are pure functions of the
experience and the configuration. `TrainingStep.update` calls `train`: mini-batches through actor and critic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from slurm_rlhf.algorithms import reward_shaping
from slurm_rlhf.algorithms.advantages import estimate, teacher_advantages
from slurm_rlhf.algorithms.batching import Shard, assemble, mini_batches
from slurm_rlhf.algorithms.correction import COLUMN, correct
from slurm_rlhf.algorithms.losses import approx_kl, loss_weights, positive_weights
from slurm_rlhf.algorithms.packed import find_actions, response_sums
from slurm_rlhf.algorithms.policy_losses import aggregation_of
from slurm_rlhf.algorithms.registry import AdvantageInputs, Algorithm
from slurm_rlhf.algorithms.reward_shaping import summed
from slurm_rlhf.config.reward_sources import ENVIRONMENT
from slurm_rlhf.config.roles import ACTOR, CRITIC, REFERENCE, actor_is_reference, has_teacher
from slurm_rlhf.config.rules import before_update, correction_of
from slurm_rlhf.config.schema import Config
from slurm_rlhf.records import F32, I32, STOP, Bool, Experience
from slurm_rlhf.rewards.scored import Rewards
from slurm_rlhf.wire.calls import (
    ActorCalls,
    CriticCalls,
    ForwardBatch,
    LogprobCalls,
    TrainAnswer,
    TrainBatch,
    TrainerCalls,
)
from slurm_rlhf.wire.handles import RoleHandle, gather, send_shards


def passes(config: Config) -> Iterator[tuple[str, Callable[[Any, ForwardBatch], F32], str]]:
    """Yield role, call and column of each pass without gradients; a role that the run lacks has no column."""
    if before_update(config):
        yield ACTOR, LogprobCalls.logprobs, "logprobs"
    if actor_is_reference(config):
        yield ACTOR, ActorCalls.reference_logprobs, "ref_logprobs"
    yield REFERENCE, LogprobCalls.logprobs, "ref_logprobs"
    yield CRITIC, CriticCalls.values, "values"


def fill_passes(config: Config, roles: Mapping[str, RoleHandle[Any]], experience: Experience) -> None:
    """Fill the columns of log-probs and values, all roles at once.

    With algo.correction.bypass the engine's log-probs are the old ones, and the actor computes none; nor does it where
    they are of the update's own pass (`rules.of_the_update`), after which `TrainingStep.update` fills the column.
    """
    if config.algo.correction.bypass:
        engine = experience.columns["rollout_logprobs"]
        experience.columns["logprobs"] = np.where(experience.action_mask, engine, np.float32(0.0))
    running: list[tuple[str, list[Shard], list[Future[F32]]]] = []
    for role, method, column in passes(config):
        if role in roles:
            parts, calls = send_shards(roles[role], method, ForwardBatch, experience, config.train.forward_tokens)
            one_at_a_time(config, calls)
            running.append((column, parts, calls))
    for column, parts, calls in running:
        experience.columns[column] = assemble(experience, parts, gather(calls))


def one_at_a_time(config: Config, calls: list[Future[Any]]) -> None:
    """Wait for `calls` if all roles share their accelerators: their peaks of memory must not add up."""
    if config.train.colocate_all:
        gather(calls)


def without_skipped(config: Config, experience: Experience, rewards: Rewards) -> Rewards:
    """Take responses without a reward out of the actions; give each the mean of the others to its prompt.

    So the others alone make the baseline of the group, and nothing is trained on the skipped ones.
    """
    if rewards.skipped is None or not rewards.skipped.any():
        return rewards
    experience.action_mask = experience.action_mask & ~np.repeat(rewards.skipped, experience.response_lens)
    groups, counts = groups_of(config, experience), ~rewards.skipped

    def filled(values: F32) -> F32:
        means = summed(np.where(counts, values, 0), groups) / np.maximum(summed(counts.astype(np.float64), groups), 1)
        return np.where(counts, values, means).astype(np.float32)

    components = {name: filled(values) for name, values in rewards.components.items()}
    return replace(rewards, rewards=filled(rewards.rewards), components=components)


def fill_advantages(
    config: Config,
    algorithm: Algorithm,
    experience: Experience,
    judged: Rewards,
    kl_coef: float,
    scale: reward_shaping.RewardScale | None,
) -> dict[str, float]:
    """Fill the columns of advantages and, for a critic, returns; return their metrics.

    `judged`: the rewards that are used, which `experience.rewards` holds, too. `scale` normalises the rewards with the
    statistics of earlier batches and of this one; it is not changed.
    """
    columns, offsets, whole = experience.columns, experience.action_offsets, experience.action_mask
    mask = loss_mask(config, experience)
    advantage, kl, measured = config.algo.advantage, None, {}
    if "ref_logprobs" in columns:
        kl = approx_kl(columns["logprobs"], columns["ref_logprobs"], config.algo.kl.estimator)
        measured = {"kl": float(response_sums(kl, whole, offsets).mean()), "kl_coef": kl_coef}
    rewards = judged.rewards
    if scale is not None:
        rewards = reward_shaping.normalized(rewards, scale.with_batch(rewards))
    rewards, shaping = shaped_rewards(config, experience, judged, rewards)
    inputs = AdvantageInputs(
        rewards=rewards,
        kl=kl,
        values=columns.get("values"),
        action_mask=mask,
        offsets=offsets,
        groups=groups_of(config, experience),
        kl_coef=0.0 if config.algo.kl.use_loss else kl_coef,
        clip_range=config.reward.clip_range,
        gamma=advantage.gamma,
        lambd=advantage.lambd,
        lambd_critic=advantage.lambd if advantage.lambd_critic < 0 else advantage.lambd_critic,
        no_std_norm=advantage.no_std_norm,
        components=judged.components,
        component_weights=component_weights(config),
        lengths=find_actions(whole, offsets).counts,
    )
    columns |= estimate(algorithm, inputs, no_whitening=advantage.no_whitening)
    if has_teacher(config):
        gap = teacher_advantages(columns["logprobs"], columns["ref_logprobs"], mask)
        columns["advantages"] = columns["advantages"] + np.float32(config.algo.distill.coef) * gap
        measured["teacher_gap"] = float(gap[mask].mean()) if mask.any() else 0.0
    metrics = {
        **measured,
        "reward_clipped": reward_shaping.clipped_share(_compared(algorithm, inputs), config.reward.clip_range),
    }
    for name, column in (("value", "values"), ("return", "returns")):
        if column in columns:
            metrics[name] = float(columns[column][mask].mean()) if mask.any() else 0.0
    if config.rollout.mask_truncated:
        shaping["shaping/masked"] = float((whole & ~mask).sum() / max(whole.sum(), 1))
    return metrics | shaping


def component_weights(config: Config) -> dict[str, float]:
    """Return the weight of each component of the reward that is to be used; empty: all of them, with weight 1."""
    keys, weights = config.algo.advantage.gdpo_reward_keys, config.algo.advantage.gdpo_reward_weights
    if not keys:
        own = {ENVIRONMENT: 1.0} if config.env.path and config.reward.sources else {}
        return own | {part.name: part.weight for part in config.reward.sources}
    return dict(zip(keys, weights or [1.0] * len(keys), strict=True))


def _compared(algorithm: Algorithm, inputs: AdvantageInputs) -> ArrayLike:
    """Return the numbers that the algorithm clips and compares: rewards [N], or all components of them."""
    if not algorithm.needs_components:
        return inputs.rewards
    return np.concatenate([inputs.components[name] for name in inputs.component_weights or inputs.components])


def fill_correction(config: Config, experience: Experience, age: I32) -> dict[str, float]:
    """Fill the column of weights, if there is a correction; answer how far engine and actor are apart.

    `age` [A]: updates between the policy that sampled a token and the actor's. The weights are of the policy's loss
    alone, as in OpenRLHF and verl: the critic learns the value of states that were visited, whichever policy came
    there, and dropping them would leave it without the values that later advantages need.
    """
    weights, metrics = correct(correction_of(config), config.algo.correction.off_policy_delta, experience, age)
    if weights is not None:
        experience.columns[COLUMN] = weights
    return metrics


def groups_of(config: Config, experience: Experience) -> reward_shaping.Groups:
    """Number the prompt of each response, [N]: 0, 0, 1, 1, ..."""
    return np.arange(len(experience)) // config.rollout.n_samples_per_prompt


def shaped_rewards(
    config: Config, experience: Experience, judged: Rewards, rewards: F32
) -> tuple[F32, dict[str, float]]:
    """Return `rewards` with the penalties that are on, [N], and their metrics.

    `rewards` are the normalised ones of `judged`, whose own scores, or rewards without scores, say by being above 0
    whether a response is correct.
    """
    correct = (judged.rewards if judged.scores is None else judged.scores) > 0
    groups, longest = groups_of(config, experience), config.rollout.max_new_tokens
    shaped, metrics = reward_shaping.shape(rewards, experience, correct, groups, longest, config.reward)
    return shaped.astype(np.float32), metrics


def loss_mask(config: Config, experience: Experience) -> Bool:
    """Return the actions that are trained on, [A]: with rollout.mask_truncated none of a response that was cut off.

    Its reward stays in the baseline of its group: the baseline estimates what the policy earns with this prompt, and
    without those that failed by their length the others would look worse than they are. So do DAPO (Yu et al., 2025,
    arXiv 2503.14476: overlong filtering) and TRL's `mask_truncated_completions`.
    """
    if not config.rollout.mask_truncated or not experience.finish_reasons:
        return experience.action_mask
    ended = np.array([reason == STOP for reason in experience.finish_reasons], dtype=np.bool_)
    return experience.action_mask & np.repeat(ended, experience.response_lens)


def fill_loss_weights(config: Config, algorithm: Algorithm, batch: Experience, kl_coef: float) -> float:
    """Fill the columns of weights of a mini-batch, which is one optimizer step; return its denominator.

    loss_weights: weights of the policy loss, its aggregation times the correction; without the column all are 1. The
    denominator counts all actions, whatever weight the correction gives them (`algorithms.correction`).
    entropy_weights: weights of the entropy bonus, by the aggregation alone. kl_weights: the same times `kl_coef`, if
    the KL penalty is a term of the loss. nll_weights: weights of the likelihood of good responses. Each term has its
    own column, because the correction for the age of samples applies to the policy loss alone.
    """
    mode = aggregation_of(config.actor.loss_agg_mode, config.actor.policy_loss_type, algorithm.aggregation)
    longest = config.rollout.max_new_tokens
    denominator, weights = loss_weights(mode, batch.action_mask, batch.action_offsets, longest)
    if weights is not None and config.actor.entropy_coef != 0.0:
        batch.columns["entropy_weights"] = weights
    if config.algo.kl.use_loss:
        ones = np.ones(len(batch.action_mask), dtype=np.float32)
        batch.columns["kl_weights"] = (ones if weights is None else weights) * np.float32(kl_coef)
    if config.actor.nll_coef:
        batch.columns["nll_weights"] = positive_weights(batch.rewards, batch.action_mask, batch.action_offsets)
    factors = [each for each in (weights, batch.columns.pop(COLUMN, None)) if each is not None]
    if factors:
        batch.columns["loss_weights"] = reduce(np.multiply, factors)
    return denominator


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
