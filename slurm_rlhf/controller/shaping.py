"""Apply the keys that judge a response by its end and its length: penalties in the reward, and the mask of the loss."""

from __future__ import annotations

import numpy as np

from slurm_rlhf.algorithms.groups import Groups
from slurm_rlhf.algorithms.reward_shaping import Responses, Shaping, shape
from slurm_rlhf.config.schema import Config
from slurm_rlhf.records import F32, REPETITION, STOP, Bool, Experience
from slurm_rlhf.rewards.values import Rewards


def groups_of(config: Config, experience: Experience) -> Groups:
    """Number the prompt of each response, [N]: 0, 0, 1, 1, ..."""
    return np.arange(len(experience)) // config.rollout.n_samples_per_prompt


def shaped_rewards(
    config: Config, experience: Experience, judged: Rewards, rewards: F32
) -> tuple[F32, dict[str, float]]:
    """Return `rewards` with the penalties that are on, [N], and their metrics.

    `rewards` are the normalised ones of `judged`, whose own scores, or rewards without scores, say by being above 0
    whether a response is correct.
    """
    group = config.reward
    how = Shaping(
        longest=config.rollout.max_new_tokens,
        overlong_buffer_len=group.overlong_buffer_len,
        overlong_penalty_factor=group.overlong_penalty_factor,
        stop_properly_penalty_coef=group.stop_properly_penalty_coef,
        length_penalty_coef=group.length_penalty_coef,
    )
    reasons = np.array(experience.finish_reasons or [STOP] * len(experience))
    responses = Responses(
        lengths=experience.response_lens,
        ended=reasons == STOP,
        repeated=reasons == REPETITION,
        correct=(judged.rewards if judged.scores is None else judged.scores) > 0,
        groups=groups_of(config, experience),
    )
    shaped, metrics = shape(rewards, responses, how)
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
