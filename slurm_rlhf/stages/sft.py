"""Supervised fine-tuning (`slurm-rlhf sft`): the answers of examples become likelier."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from torch import Tensor

from slurm_rlhf.algorithms.losses import Metrics
from slurm_rlhf.config.schema import Config
from slurm_rlhf.data.tokenizer import Tokenizer
from slurm_rlhf.records import Experience
from slurm_rlhf.stages.examples import Examples, load_examples
from slurm_rlhf.stages.stage import Stage, StageTrainer
from slurm_rlhf.trainer.trainers import LanguageModelTrainer


class SftTrainer(LanguageModelTrainer, StageTrainer):
    """Trains the answers of examples on one rank."""

    def __init__(self, config: Config, total_steps: int) -> None:
        super().__init__(config, config.sft.learning_rate, total_steps)

    def _loss(self, part: Experience, denominator: float) -> tuple[Tensor, Metrics]:
        """Sum the cross-entropy of this micro-batch's answers, divided by the answer tokens of the whole step."""
        batch = self._collate(part)
        logprobs, _ = self.backend.forward(batch.input_ids, batch.action_index, batch.targets, row=batch.row)
        total = -batch.whole(logprobs).sum()
        return total / denominator, {"loss": total.detach()}


class SftStage(Stage):
    """Trains on `sft.dataset`."""

    name: ClassVar[str] = "sft"

    def load(self, path: Path, tokenizer: Tokenizer, config: Config) -> Examples:
        return load_examples(path, tokenizer, config.data)

    def trainer(self, config: Config, total_steps: int) -> SftTrainer:
        return SftTrainer(config, total_steps)

    def denominator(self, batch: Experience) -> float:
        return float(batch.response_lens.sum())
