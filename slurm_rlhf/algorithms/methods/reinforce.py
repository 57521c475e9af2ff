"""Methods without a critic: the baseline is made from the rewards of the other responses to the same prompt."""

from __future__ import annotations

import numpy as np

from slurm_rlhf.algorithms.advantages import gae, token_rewards
from slurm_rlhf.algorithms.packed import F64, find_actions
from slurm_rlhf.algorithms.registry import AdvantageInputs, Algorithm
from slurm_rlhf.algorithms.reward_shaping import centred, clipped, counted, from_first, normed, summed
from slurm_rlhf.errors import ConfigError
from slurm_rlhf.records import F32


def reinforce(inputs: AdvantageInputs) -> tuple[F32, None]:
    """Return the reward itself: A = R. Source: Hu et al., REINFORCE++ (2025), arXiv 2501.03262, with whitening."""
    return returns_to_go(inputs, _rewards(inputs))


def reinforce_baseline(inputs: AdvantageInputs) -> tuple[F32, None]:
    """Compare with the mean of the group: A = R - mean. Source: as `reinforce`, its variant with a baseline."""
    return returns_to_go(inputs, centred(_rewards(inputs), inputs.groups))


def rloo(inputs: AdvantageInputs) -> tuple[F32, None]:
    """Compare with the mean of the others in the group: A = R_i - mean of R_j, j != i; 0 for a response alone.

    Source: Ahmadian et al., Back to Basics: Revisiting REINFORCE Style Optimization (2024), arXiv 2402.14740. Not
    whitened, as in the paper.
    """
    counts = counted(inputs.groups)
    return returns_to_go(inputs, centred(_rewards(inputs), inputs.groups) * counts / np.maximum(counts - 1, 1))


def group_norm(inputs: AdvantageInputs) -> tuple[F32, None]:
    """Divide by the spread of the group: A = (R - mean) / (std + 1e-6); 0 in a group without spread.

    std is the unbiased one (n - 1), as in OpenRLHF and verl. Source: Shao et al., DeepSeekMath (2024), arXiv
    2402.03300, section 4.1.2, there called GRPO.
    """
    return returns_to_go(inputs, normed(_rewards(inputs), inputs.groups, inputs.no_std_norm))


def opo(inputs: AdvantageInputs) -> tuple[F32, None]:
    """Compare with the mean over the tokens of the group: A = R - sum(n_j R_j) / sum(n_j), n_j actions in response j.

    This baseline has the least variance if the squared gradient of a response grows with its length. 0 in a group
    without spread or actions. Source: Hao et al., On-Policy RL with Optimal Reward Baseline (2025), arXiv 2505.23585.
    """
    counts = find_actions(inputs.action_mask, inputs.offsets).counts if inputs.lengths is None else inputs.lengths
    actions = counts.astype(np.float64)
    offset = from_first(_rewards(inputs), inputs.groups)
    baseline = summed(actions * offset, inputs.groups) / np.maximum(summed(actions, inputs.groups), 1)
    return returns_to_go(inputs, offset - baseline)


def max_rl(inputs: AdvantageInputs) -> tuple[F32, None]:
    """Divide by the mean of the group, its share of successes: A = (R - mean) / mean; 0 in a group without success.

    So the gradient is that of the log of the pass rate, to the order of the group size. Source: Tajwar et al., Maximum
    Likelihood Reinforcement Learning (2026), arXiv 2602.02710. Its rewards are 0 and 1; any from 0 up are taken, which
    keeps A between -1 and the group size less 1. Raises ConfigError for rewards below 0: a mean near 0 would blow A up,
    and a negative one turn better into worse.
    """
    rewards = _rewards(inputs)
    if (rewards < 0).any():
        raise ConfigError(
            f"algo.advantage.estimator = max_rl divides by a group's mean reward, its share of successes, and the "
            f"lowest of these rewards is {rewards.min():g}: return rewards of 0 or more, or use group_norm"
        )
    mean = summed(rewards, inputs.groups) / counted(inputs.groups)
    return returns_to_go(inputs, centred(rewards, inputs.groups) / np.where(mean > 0, mean, 1.0))


def _rewards(inputs: AdvantageInputs) -> F64:
    return clipped(inputs.rewards, inputs.clip_range)


def returns_to_go(inputs: AdvantageInputs, rewards: F64) -> tuple[F32, None]:
    """Give every token the discounted sum of the KL penalties and the reward that follow it, [A]."""
    unbounded = (-np.inf, np.inf)
    per_token = token_rewards(inputs.kl, inputs.kl_coef, rewards, inputs.action_mask, inputs.offsets, unbounded)
    zeros = np.zeros(len(per_token), dtype=np.float32)
    return gae(per_token, zeros, inputs.action_mask, inputs.offsets, inputs.gamma, 1.0)[0], None


REINFORCE = Algorithm("reinforce", reinforce, whiten=True)
REINFORCE_BASELINE = Algorithm("reinforce_baseline", reinforce_baseline, min_samples_per_prompt=2, whiten=True)
RLOO = Algorithm("rloo", rloo, min_samples_per_prompt=2)
GROUP_NORM = Algorithm("group_norm", group_norm, min_samples_per_prompt=2, divides_by_spread=True)
OPO = Algorithm("opo", opo, min_samples_per_prompt=2)
MAX_RL = Algorithm("max_rl", max_rl, min_samples_per_prompt=2, refuses_negative_rewards=True)
# Liu et al., Understanding R1-Zero-Like Training (2025), arXiv 2503.20783: neither the spread nor the length divides.
DR_GRPO = Algorithm("dr_grpo", reinforce_baseline, min_samples_per_prompt=2, aggregation="seq-mean-token-sum-norm")


def gdpo(inputs: AdvantageInputs) -> tuple[F32, None]:
    """Add up the rewards after each was normalised in its group: A = sum_k w_k (R_k - mean_k) / (std_k + 1e-6).

    GRPO normalises the sum instead: different combinations of rewards get the same advantage, and the reward with the
    largest spread decides. A reward without spread in a group adds nothing there. The result is whitened over the
    tokens of the batch, as in verl and in the authors' code for it; the paper and TRL take mean and standard deviation
    over the responses. Each component is clipped by reward.clip_range. Source: Liu et al., GDPO: Group reward-Decoupled
    Normalization Policy Optimization (2026), arXiv 2601.05242.

    Takes the components that `algo.advantage.gdpo_reward_keys` names, with the weights of
    `algo.advantage.gdpo_reward_weights`, or all of them with weight 1. Raises ConfigError if a component is missing.
    """
    names = list(inputs.component_weights or inputs.components)
    if not inputs.components:
        raise ConfigError(
            "algo.advantage.estimator = gdpo takes several rewards for each response, and the reward function returned "
            'one: let it return {"rewards": ..., "components": {"name": one number per response, ...}}'
        )
    for name in names:
        if name not in inputs.components:
            raise ConfigError(
                f"algo.advantage.gdpo_reward_keys names the component {name!r}, and the reward function returned "
                f"{', '.join(map(repr, inputs.components))}: correct the key or the function"
            )
    total = np.zeros(len(inputs.groups))
    for name in names:
        component = clipped(inputs.components[name], inputs.clip_range)
        total += inputs.component_weights.get(name, 1.0) * normed(component, inputs.groups, inputs.no_std_norm)
    return returns_to_go(inputs, total)


GDPO = Algorithm("gdpo", gdpo, min_samples_per_prompt=2, whiten=True, divides_by_spread=True, needs_components=True)
