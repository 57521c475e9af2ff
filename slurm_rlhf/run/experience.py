"""Fill the columns that an update needs: log-probs and values by the roles, advantages and weights here.

`TrainingStep.collect` calls these in turn. `fill_advantages` and `fill_correction` are pure functions of the
experience and the configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from slurm_rlhf.algorithms import reward_shaping
from slurm_rlhf.algorithms.advantages import estimate, teacher_advantages
from slurm_rlhf.algorithms.batching import Shard, assemble
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
from slurm_rlhf.wire.calls import ActorCalls, CriticCalls, ForwardBatch, LogprobCalls
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

    With algo.correction.bypass the engine's log-probs are the old ones, and the actor computes none; nor does it if
    they come from the update's own pass (`rules.of_the_update`), after which `TrainingStep.update` fills the column.
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
    # A response is correct if its score, or without scores its reward, is above 0.
    correct = (judged.rewards if judged.scores is None else judged.scores) > 0
    longest = config.data.max_len - experience.prompt_lens if config.env.path else config.rollout.max_new_tokens
    groups = groups_of(config, experience)
    shaped, shaping = reward_shaping.shape(rewards, experience, correct, groups, longest, config.reward)
    inputs = AdvantageInputs(
        rewards=shaped.astype(np.float32),
        kl=kl,
        values=columns.get("values"),
        action_mask=mask,
        offsets=offsets,
        groups=groups,
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
    """Fill the column of weights, if there is a correction; return metrics of how far engine and actor are apart.

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
