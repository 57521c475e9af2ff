"""Say where the log-probs that a policy's ratio is taken to come from."""

from __future__ import annotations

from slurm_rlhf.config.correction import corrects
from slurm_rlhf.config.roles import has_reference
from slurm_rlhf.config.schema import Config


def of_the_update(config: Config) -> bool:
    """Tell whether the old log-probs are those of the update's own forward pass, so that none is made before it.

    They are where a batch is one optimizer step, which starts from the policy that they are of, and where nothing needs
    them before: no correction, no reference to compare with. The ratio is 1 then, and its gradient is that of the
    log-probs. TRL and verl leave out the same pass.
    """
    responses = config.rollout.batch_size * config.rollout.n_samples_per_prompt
    one_step = config.train.max_epochs == 1 and config.train.batch_size == responses
    needed = corrects(config) or has_reference(config) or config.critic.freezing_steps
    return config.actor.old_logprobs == "auto" and one_step and not needed


def before_update(config: Config) -> bool:
    """Tell whether the actor computes log-probs before the update: not with the engines', and not `of_the_update`."""
    return not (config.algo.correction.bypass or of_the_update(config))
