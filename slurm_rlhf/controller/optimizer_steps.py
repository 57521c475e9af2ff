"""How long the learning-rate schedules are."""

from __future__ import annotations

from slurm_rlhf.config.schema import Config


def optimizer_steps(config: Config, role: str, steps: int) -> int:
    """Optimizer steps of `role` in a run of `steps` training steps.

    While the actor is frozen (critic.freezing_steps) it takes none, so its schedule begins behind them and still ends
    with the run.
    """
    responses = config.rollout.batch_size * config.rollout.n_samples_per_prompt
    frozen = config.critic.freezing_steps if role == "actor" else 0
    return max(steps - frozen, 0) * config.train.max_epochs * responses // config.train.batch_size
