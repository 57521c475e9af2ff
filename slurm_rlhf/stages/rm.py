"""Training of a reward model (`slurm-rlhf rm`): the chosen answer of a pair gets the higher score."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from slurm_rlhf.algorithms.losses import Metrics
from slurm_rlhf.algorithms.preferences import bradley_terry, judged
from slurm_rlhf.config.schema import Config, Data, Ds
from slurm_rlhf.data.tokenizer import Tokenizer
from slurm_rlhf.records import Experience
from slurm_rlhf.stages.examples import Examples, load_pairs
from slurm_rlhf.stages.stage import StageTrainer
from slurm_rlhf.trainer.export import classifier, save_reward
from slurm_rlhf.trainer.frozen import last_token
from slurm_rlhf.trainer.trainers import HeadTrainer


class RmTrainer(StageTrainer, HeadTrainer):
    """Trains scores on one rank, at the token where transformers' sequence classification has them."""

    name = "rm"
    measures_always = True  # the scores are normalised

    @staticmethod
    def read(path: Path, tokenizer: Tokenizer, data: Data) -> Examples:
        return load_pairs(path, tokenizer, data, margins=True)

    def __init__(self, config: Config, total_steps: int) -> None:
        super().__init__(config, total_steps)
        config_of_body = self.backend.module.model.config
        classifier(config_of_body, {})  # whether transformers has one is to be known now, not at the end
        tokenizer = Tokenizer.load(config.actor.model_name_or_path)
        # transformers refuses batches without a padding token.
        pad = config_of_body.get_text_config().pad_token_id
        self.pad: int = tokenizer.eos_token_id if pad is None else pad
        self.statistics: dict[str, float] = {}
        """`mean` and `std` of the scores that were measured last, by which they are normalised."""

    def _load(self, ds: Ds) -> nn.Module:
        module: Any = super()._load(ds)
        module.value_head.drop_bias()  # a difference of scores has none, nor has transformers' head
        return module

    def scores(self, part: Experience) -> Tensor:
        """Compute the score of each sequence of a micro-batch, fp32 [N]. Collective."""
        batch = self._collate(part, last_token(part, self.pad))
        return batch.whole(self.backend.forward(batch.input_ids, batch.action_index, row=batch.row))

    def _loss(self, part: Experience, denominator: float) -> tuple[Tensor, Metrics]:
        """Add up the losses of this micro-batch's pairs, divided by the pairs of the whole step."""
        scores = self.scores(part)
        chosen, rejected = scores[::2], scores[1::2]
        loss = bradley_terry(chosen, rejected, torch.from_numpy(part.rewards[::2]).to(scores.device)).sum()
        margin = (chosen - rejected).detach()
        metrics = {"loss": loss.detach(), "preferred": (margin > 0).float().sum(), "margin": margin.sum()}
        return loss / denominator, metrics

    def measured(self, examples: Examples) -> dict[str, float]:
        """Measure the scores by `preferences.judged`, and keep what normalises them."""
        scores = self.of_all(examples, self.scores, of_rows=True)
        found, numbers = judged(scores), torch.from_numpy(scores)
        # Scores that are all alike have no deviation to divide by.
        self.statistics = {"mean": found["mean"], "std": max(found["std"], 1e-6)}
        margins = torch.from_numpy(examples.experience.rewards[::2])
        return {"loss": float(bradley_terry(numbers[::2], numbers[1::2], margins).mean()), **found}

    def export_hf(self, directory: Path) -> None:
        module, backend, rank = self.backend.module, self.backend, self.world.rank
        (head,) = [module.value_head.exact("weight").detach().cpu() for _ in backend.gathered(module.value_head)]
        settings = {"pad_token_id": self.pad, **self.statistics}
        source = Path(self.config.actor.model_name_or_path)
        save_reward(module.model, backend.gathered(module.model), head, settings, source, directory, rank)
