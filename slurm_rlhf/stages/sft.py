"""Supervised fine-tuning (`slurm-rlhf sft`): the answers of examples become likelier."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import numpy as np
from torch import Tensor

from slurm_rlhf.algorithms.losses import Metrics
from slurm_rlhf.config.schema import Config
from slurm_rlhf.data.tokenizer import Tokenizer
from slurm_rlhf.records import Experience
from slurm_rlhf.stages.examples import Examples, load_examples
from slurm_rlhf.stages.stage import AnswerTrainer, Stage


class SftTrainer(AnswerTrainer):
    """Trains the answers of examples on one rank."""

    def __init__(self, config: Config, total_steps: int) -> None:
        super().__init__(config, config.sft.learning_rate, total_steps)

    def _loss(self, part: Experience, denominator: float) -> tuple[Tensor, Metrics]:
        """Sum the cross-entropy of this micro-batch's answers, divided by the answer tokens of the whole step."""
        total = -self.logprobs(part).sum()
        return total / denominator, {"loss": total.detach()}

    def measured(self, examples: Examples) -> dict[str, float]:
        return {"loss": -float(self.of_all(examples, self.logprobs, of_rows=False).mean(dtype=np.float64))}


class SftStage(Stage):
    """Trains on `sft.dataset`."""

    name: ClassVar[str] = "sft"

    def load(self, path: Path, tokenizer: Tokenizer, config: Config) -> Examples:
        return load_examples(path, tokenizer, config.data)

    def trainer(self, config: Config, total_steps: int) -> SftTrainer:
        return SftTrainer(config, total_steps)

    def denominator(self, batch: Experience) -> float:
        return float(batch.response_lens.sum())
