"""Turn one reward per response into one advantage per token: KL in the reward, GAE, whitening.

Flat packed columns of A tokens (see `packed`), float64 inside, float32 out. Values at masked positions of the inputs,
NaN included, reach no result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from slurm_rlhf.algorithms.packed import find_actions
from slurm_rlhf.algorithms.registry import AdvantageInputs, Algorithm
from slurm_rlhf.errors import ConfigError
from slurm_rlhf.records import F32, Bool
from slurm_rlhf.user_files import file_of, line_of, text_of

MIN_VARIANCE = 1e-8


def estimate(algorithm: Algorithm, inputs: AdvantageInputs, no_whitening: bool = False) -> dict[str, F32]:
    """Compute the columns `advantages` and, for a critic, `returns` of a batch as `algorithm` says.

    Raises ConfigError when its advantage function raises, or returns anything but finite numbers [A].
    """
    source, mask = file_of(algorithm.advantages), inputs.action_mask
    what = f"the advantage function of algorithm {algorithm.name!r}"
    try:
        answer = algorithm.advantages(inputs)
        advantages, returns = answer
    except ConfigError:  # its message names the key at fault
        raise
    except Exception as error:
        raise ConfigError(
            f"{line_of(source, error)}: {what} raised {text_of(error)} (it has to return two arrays: advantages, and "
            "returns or None)"
        ) from error
    columns: dict[str, F32] = {}
    wanted = {"advantages": advantages, "returns": returns} if algorithm.needs_critic else {"advantages": advantages}
    for name, found in wanted.items():
        column = np.asarray(found)
        if column.shape != mask.shape or column.dtype.kind not in "fiu":
            raise ConfigError(
                f"{source}: {what} returned {name} of type {column.dtype} and shape {column.shape}; numbers of shape "
                f"{mask.shape} are needed, one per response token"
            )
        bad = int(np.count_nonzero(~np.isfinite(column[mask])))
        if bad:
            raise ConfigError(
                f"{source}: {what} returned {bad} of {int(mask.sum())} {name} that are not finite: guard its "
                "divisions, because a group may have one sample or no spread"
            )
        columns[name] = column.astype(np.float32, copy=False)
    if algorithm.whiten and not no_whitening:
        columns["advantages"] = whiten(columns["advantages"], mask, inputs.no_std_norm)
    return columns


def token_rewards(
    kl: ArrayLike | None,
    kl_coef: float,
    rewards: ArrayLike,
    action_mask: Bool,
    offsets: NDArray[Any],
    clip_range: Sequence[float],
) -> F32:
    """Compute the reward of each token: -kl_coef * kl_t, plus the clipped reward of the response at its last action.

    Returns [A]. kl [A] (`approx_kl`; None when there is no reference), rewards [N] of any number type, clip_range
    (low, high). Only the reward is clipped, not the KL penalty. A response without a single action receives nothing:
    there is no token that could have earned its reward. Zero at masked positions.
    Raises ValueError where lengths disagree.
    Source: Ouyang et al., Training language models to follow instructions (2022), eq. 2.
    """
    actions = find_actions(action_mask, offsets, **({} if kl is None else {"kl": kl}))
    clipped = np.clip(np.asarray(rewards, dtype=np.float64), clip_range[0], clip_range[1])
    result = np.zeros(len(action_mask), dtype=np.float64)
    # At coefficient 0 an infinite KL must not become 0 * inf = NaN.
    if kl is not None and kl_coef != 0.0:
        result[actions.positions] = -kl_coef * np.asarray(kl, dtype=np.float64)[actions.positions]
    acted = actions.counts > 0
    result[actions.positions[actions.ends[acted] - 1]] += clipped[acted]
    return result.astype(np.float32)


def gae(
    token_rewards: ArrayLike,
    values: ArrayLike,
    action_mask: Bool,
    offsets: NDArray[Any],
    gamma: float,
    lambd: float,
) -> tuple[F32, F32]:
    """Estimate generalized advantages: (advantages [A], returns [A]), both zero at masked positions.

        delta_t = r_t + gamma * V_t+1 - V_t        A_t = delta_t + gamma * lambd * A_t+1        R_t = A_t + V_t

    token_rewards [A], values [A]. Masked steps are not time steps: over a gap in the mask, t + 1 is the next action
    of the same response, and nothing is discounted for the gap. After the last action value and advantage are 0,
    whether the response ended by itself or at the length limit.
    Raises ValueError where lengths disagree.
    Source: Schulman et al., High-Dimensional Continuous Control Using GAE (2016), eq. 11-16.
    """
    actions = find_actions(action_mask, offsets, token_rewards=token_rewards, values=values)
    reward = np.asarray(token_rewards, dtype=np.float64)[actions.positions]
    value = np.asarray(values, dtype=np.float64)[actions.positions]
    advantage = np.zeros_like(value)

    # All responses go backwards together; the longest come first, so that those still running are a prefix.
    order = np.argsort(-actions.counts, kind="stable")
    last, counts = actions.ends[order] - 1, actions.counts[order]
    next_value, next_advantage = np.zeros(len(order)), np.zeros(len(order))
    for back in range(int(counts.max(initial=0))):
        running = int(np.searchsorted(-counts, -back, side="left"))
        at = last[:running] - back
        delta = reward[at] + gamma * next_value[:running] - value[at]
        next_advantage[:running] = delta + gamma * lambd * next_advantage[:running]
        next_value[:running] = value[at]
        advantage[at] = next_advantage[:running]

    advantages, returns = (np.zeros(len(action_mask), dtype=np.float32) for _ in range(2))
    advantages[actions.positions] = advantage
    returns[actions.positions] = advantage + value
    return advantages, returns


def teacher_advantages(logprobs: F32, teacher: F32, action_mask: Bool) -> F32:
    """Compute log p_teacher - log p_policy of each sampled token, [A]; zero at masked positions.

    Its mean over tokens that the policy sampled is minus the reverse KL divergence per token, so as an advantage,
    without a discount, it lowers that divergence. logprobs [A]: of the policy before the update.
    Sources: Lu, On-Policy Distillation (Thinking Machines, 2025); Agarwal et al., GKD (2023), arXiv 2306.13649.
    """
    return np.where(action_mask, teacher - logprobs, np.float32(0.0)).astype(np.float32)


def whiten(x: ArrayLike, action_mask: Bool, no_std_norm: bool = False) -> F32:
    """Give x [A] mean 0 and standard deviation 1 over the actions of the whole batch; zero at masked positions.

        (x - mean) / sqrt(max(variance, 1e-8)),  population variance

    With no_std_norm only the mean is subtracted. Without actions, or where all of them are equal, the result is zero.
    Source: OpenRLHF, `experience_maker`.
    """
    result = np.zeros(len(action_mask), dtype=np.float32)
    chosen = np.asarray(x, dtype=np.float64)[action_mask]
    if chosen.size:
        centred = chosen - chosen.mean()
        spread = 1.0 if no_std_norm else np.sqrt(max(np.mean(centred**2), MIN_VARIANCE))
        result[action_mask] = centred / spread
    return result
