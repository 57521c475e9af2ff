"""What the actor's ranks need to add up the loss of an optimizer step: one denominator, and columns of weights."""

from __future__ import annotations

import numpy as np

from slurm_rlhf.algorithms.aggregation import loss_weights, positive_weights
from slurm_rlhf.algorithms.correction import COLUMN
from slurm_rlhf.algorithms.policy_losses import aggregation_of
from slurm_rlhf.algorithms.registry import Algorithm
from slurm_rlhf.config.schema import Config
from slurm_rlhf.records import Experience


def fill_loss_weights(config: Config, algorithm: Algorithm, batch: Experience, kl_coef: float) -> float:
    """Fill the columns of weights of a mini-batch, the whole of one optimizer step; answers its denominator.

    loss_weights: of the policy loss, by its aggregation times the correction; without the column every weight is 1. The
    denominator counts all actions, whatever weight the correction gives them (`algorithms.correction`).
    entropy_weights: those of the entropy bonus, by the aggregation alone. kl_weights: the same times `kl_coef`, where
    the KL penalty is a term of the loss. nll_weights: of the likelihood of good responses. The terms have columns of
    their own, because what corrects the policy loss for the age of its samples does not belong to a term of the policy
    as it is now.
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
    correction = batch.columns.pop(COLUMN, None)
    if weights is not None and correction is not None:
        weights = weights * correction
    elif correction is not None:
        weights = correction
    if weights is not None:
        batch.columns["loss_weights"] = weights
    return denominator
