"""The table of policy losses that `actor.policy_loss_type` chooses from, with their usual ranges and aggregations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slurm_rlhf.algorithms.policy_losses.clipped import gspo_loss, ppo_loss
from slurm_rlhf.algorithms.policy_losses.inputs import PolicyLoss
from slurm_rlhf.algorithms.policy_losses.reweighted import cispo_loss, dppo_tv_loss, sapo_loss

LOW_HIGH, DUAL_CLIP = "eps_clip_low_high", "dual_clip"


@dataclass(frozen=True, slots=True)
class PolicyLossRecord:
    """Describe a policy loss."""

    name: str
    """The value of `actor.policy_loss_type` that chooses it."""
    function: PolicyLoss
    keys: tuple[str, ...]
    """Keys of the group actor that it depends on; any other loss's key has no effect with it."""
    clip_range: tuple[float, float] | None = None
    """Below and above, where eps_clip_low_high is empty; None: eps_clip on both sides."""
    aggregation: str = ""
    """A name in `aggregation.AGGREGATIONS`; empty: what the algorithm says."""


_ROWS = (
    PolicyLossRecord("ppo", ppo_loss, ("eps_clip", LOW_HIGH, DUAL_CLIP)),
    # Section 5.1 of the paper.
    PolicyLossRecord("gspo", gspo_loss, (LOW_HIGH, DUAL_CLIP), (3e-4, 4e-4), "seq-mean-token-mean"),
    # The paper has no bound below and names none above. A weight of at most 5: TRL's recommendation, which it takes
    # from Khatri et al., The Art of Scaling Reinforcement Learning Compute (2025), arXiv 2510.13786.
    PolicyLossRecord("cispo", cispo_loss, (LOW_HIGH,), (1.0, 4.0)),
    PolicyLossRecord(
        "sapo", sapo_loss, ("sapo_temperature_pos", "sapo_temperature_neg"), aggregation="seq-mean-token-mean"
    ),
    PolicyLossRecord("dppo_tv", dppo_tv_loss, (LOW_HIGH,), (0.2, 0.2)),
)

POLICY_LOSSES: dict[str, PolicyLossRecord] = {row.name: row for row in _ROWS}


def clip_range(loss_type: str, low_high: Sequence[float], both: float) -> tuple[float, float]:
    """Choose how far below and above 1 (dppo_tv: a probability) a policy may move: the keys' values, else the usual."""
    if low_high:
        return low_high[0], low_high[1]
    return POLICY_LOSSES[loss_type].clip_range or (both, both)


def aggregation_of(mode: str, loss_type: str, usual: str) -> str:
    """Choose how losses of tokens become one number: `actor.loss_agg_mode`, else the loss, else `usual`, the algorithm.

    All are names in `aggregation.AGGREGATIONS`; `mode` may be empty.
    """
    return mode or POLICY_LOSSES[loss_type].aggregation or usual
