"""The reference policy: weights that never change, so no DeepSpeed and no process group."""

from __future__ import annotations

from slurm_rlhf.config.schema import Config
from slurm_rlhf.records import F32, Experience
from slurm_rlhf.training.distributed import local_device
from slurm_rlhf.training.forward import per_action
from slurm_rlhf.training.models import load_policy


class FrozenPolicy:
    """The policy that the actor starts from, whole on every rank."""

    def __init__(self, config: Config) -> None:
        """Raises ModelError."""
        module = load_policy(config.actor.model_name_or_path, config.ds, config.train.logprob_chunk_tokens)
        self.device = local_device()
        self.module = module.to(self.device).requires_grad_(False)
        self.temperature = config.rollout.temperature

    def logprobs(self, exp: Experience, micro: list[list[int]]) -> dict[str, F32]:
        """{"logprobs": fp32 [A]} at the rollout temperature; micro-batches as rows of `exp`."""
        return {
            "logprobs": per_action(
                exp,
                micro,
                self.device,
                lambda batch: self.module(batch.input_ids, batch.action_index, batch.targets, self.temperature)[0],
            )
        }
