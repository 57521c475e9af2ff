"""Model FLOPs of a training step: a pure function of the models' shapes and the lengths of what was sampled."""

from __future__ import annotations

from dataclasses import dataclass

from slurm_rlhf.config.roles import ACTOR, CRITIC, REFERENCE, REWARD
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import ModelError
from slurm_rlhf.placement.flops import batch_flops
from slurm_rlhf.placement.holdings import read_models
from slurm_rlhf.placement.model_shape import ModelShape
from slurm_rlhf.records import Experience


@dataclass(frozen=True, slots=True)
class StepFlops:
    """What the mathematics needs, whatever is computed twice: no recomputation of activations, no padding.

    Logits are counted for response tokens only. A prompt is sampled from once for all of its responses.
    """

    policy: ModelShape
    critic: ModelShape | None  # None: the algorithm has none
    reward: ModelShape | None  # None: a function
    reference: bool
    epochs: int
    samples: int  # responses per prompt

    @classmethod
    def of(cls, config: Config) -> StepFlops | None:
        """None where the shape of a model is not known."""
        try:
            models = read_models(config)
        except ModelError:
            return None
        epochs, samples = config.train.max_epochs, config.rollout.n_samples_per_prompt
        return cls(models[ACTOR], models.get(CRITIC), models.get(REWARD), REFERENCE in models, epochs, samples)

    def update(self, experience: Experience, actor_trains: bool) -> float:
        """Of the training passes of actor and critic."""
        lengths, responses = [int(n) for n in experience.lengths], int(experience.response_lens.sum())
        once = batch_flops(self.critic, lengths, True, 0) if self.critic else 0.0
        if actor_trains:
            once += batch_flops(self.policy, lengths, True, responses)
        return self.epochs * once

    def others(self, experience: Experience) -> float:
        """Of sampling and of all passes without gradients."""
        lengths, responses = [int(n) for n in experience.lengths], int(experience.response_lens.sum())
        policy = batch_flops(self.policy, lengths, False, responses)
        prompts = [int(n) for n in experience.prompt_lens]
        again = batch_flops(self.policy, prompts, False, 0) - batch_flops(
            self.policy, prompts[:: self.samples], False, 0
        )
        total = (2 + self.reference) * policy - again  # sampled, and scored by actor and reference
        total += batch_flops(self.critic, lengths, False, 0) if self.critic else 0.0
        return total + (batch_flops(self.reward, lengths, False, 0) if self.reward else 0.0)
