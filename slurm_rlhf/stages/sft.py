"""Supervised fine-tuning (`slurm-rlhf sft`): the answers of examples become likelier."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from slurm_rlhf.algorithms.losses import Metrics
from slurm_rlhf.records import Experience
from slurm_rlhf.stages.examples import Examples, load_examples
from slurm_rlhf.stages.stage import AnswerTrainer


class SftTrainer(AnswerTrainer):
    """Trains the answers of examples on one rank, those of `sft.dataset`."""

    name = "sft"
    read = staticmethod(load_examples)

    def denominator(self, batch: Experience) -> float:
        """Count the answer tokens."""
        return float(batch.response_lens.sum())

    def _loss(self, part: Experience, denominator: float) -> tuple[Tensor, Metrics]:
        """Sum the cross-entropy of this micro-batch's answers, divided by the answer tokens of the whole step."""
        total = -self.logprobs(part).sum()
        return total / denominator, {"loss": total.detach()}

    def measured(self, examples: Examples) -> dict[str, float]:
        return {"loss": -float(self.of_all(examples, self.logprobs, of_rows=False).mean(dtype=np.float64))}
