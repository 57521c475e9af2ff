"""Training on preferences (`slurm-rlhf dpo`): DPO, IPO, SimPO, ORPO on pairs of answers."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from slurm_rlhf.algorithms.losses import Metrics
from slurm_rlhf.algorithms.packed import response_sums
from slurm_rlhf.algorithms.preferences import LOSSES, WITHOUT_REFERENCE, Pairs
from slurm_rlhf.config.model_directory import model_contents
from slurm_rlhf.config.schema import Config
from slurm_rlhf.data.tokenizer import Tokenizer
from slurm_rlhf.records import F32, Experience
from slurm_rlhf.stages.examples import Examples, load_pairs
from slurm_rlhf.stages.record import StageRecord
from slurm_rlhf.stages.stage import Stage, StageTrainer, fingerprint
from slurm_rlhf.trainer.batch import TokenBatch
from slurm_rlhf.trainer.distributed import undisturbed


class DpoTrainer(StageTrainer):
    """Trains on pairs of answers on one rank; with a reference, `train_step` needs the column `ref_logprobs`."""

    def __init__(self, config: Config, total_steps: int) -> None:
        super().__init__(config, config.dpo.learning_rate, total_steps)

    def logprobs(self, exp: Experience, micro: list[list[int]]) -> dict[str, F32]:
        """Compute {"logprobs": fp32 [A]} in eval mode; micro-batches as rows of `exp`. Collective."""
        module = self.backend.module
        with undisturbed(module, self.world.device):
            module.eval()
            return {"logprobs": self._per_action(exp, micro, self._forward)}

    def _forward(self, batch: TokenBatch) -> Tensor:
        logprobs: Tensor = self.backend.forward(batch.input_ids, batch.action_index, batch.targets, row=batch.row)[0]
        return logprobs

    def _loss(self, part: Experience, denominator: float) -> tuple[Tensor, Metrics]:
        """Add up the losses of this micro-batch's pairs, divided by the pairs of the whole step."""
        keys, device = self.config.dpo, self.world.device
        batch = self._collate(part)
        owner = torch.from_numpy(np.repeat(np.arange(len(part)), part.response_lens)).to(device)
        sums = torch.zeros(len(part), device=device).index_add(0, owner, batch.whole(self._forward(batch)).float())
        reference = torch.zeros(len(part), device=device)
        if "ref_logprobs" in part.columns:
            known = response_sums(part.columns["ref_logprobs"], part.action_mask, part.action_offsets)
            reference = torch.from_numpy(known).to(device, torch.float32)
        tokens = torch.from_numpy(part.response_lens).to(device, torch.float32)
        pairs = Pairs(*(values[place::2] for values in (sums, reference, tokens) for place in (0, 1)))
        loss = LOSSES[keys.loss_type](pairs, keys.beta, keys.label_smoothing, keys.simpo_gamma).sum()
        margin = keys.beta * pairs.log_ratio.detach()
        metrics = {
            "loss": loss.detach(),
            "preferred": (margin > 0).float().sum(),
            "margin": margin.sum(),
            "chosen_logprobs": pairs.chosen.detach().sum(),
            "rejected_logprobs": pairs.rejected.detach().sum(),
        }
        return loss / denominator, metrics


class DpoStage(Stage):
    """Trains on `dpo.dataset`."""

    name: ClassVar[str] = "dpo"

    def load(self, path: Path, tokenizer: Tokenizer, config: Config) -> Examples:
        return load_pairs(path, tokenizer, config.data)

    def trainer(self, config: Config, total_steps: int) -> DpoTrainer:
        return DpoTrainer(config, total_steps)

    def denominator(self, batch: Experience) -> float:
        return len(batch) / 2

    def prepare(self, trainer: DpoTrainer, examples: Examples, record: StageRecord) -> None:
        """Compute the log-probs of the reference, which is the model as it starts, or read those of an earlier start.

        They are kept beside the checkpoint, under a hash of the model and the examples.
        """
        config, experience = trainer.config, examples.experience
        if config.dpo.loss_type in WITHOUT_REFERENCE:
            return
        model = model_contents(Path(config.actor.model_name_or_path))
        file = record.root / f"reference-{model[:16]}-{fingerprint(examples)[:16]}-{config.ds.param_dtype}.npy"
        there = torch.tensor([float(file.is_file())], device=trainer.world.device)
        dist.all_reduce(there)  # a file system may show it to some ranks later
        if there == trainer.world.size:
            experience.columns["ref_logprobs"] = np.load(file)
            return
        record.say(f"computing the reference's log-probs of {len(examples)} pairs, once")
        ranks = trainer.world.size // trainer.layout.ranks
        padded = [*range(len(examples)), *[len(examples) - 1] * (-len(examples) % ranks)]
        whole = experience.select(examples.rows(padded))
        micro = trainer.micro_batches(whole, examples)
        rows = sorted(row for rows in micro for row in rows)
        place = {row: number for number, row in enumerate(rows)}
        own = trainer.logprobs(whole.select(rows), [[place[row] for row in rows] for rows in micro])["logprobs"]
        found = torch.zeros(int(whole.action_offsets[-1]), dtype=torch.float32)
        found[torch.from_numpy(whole.actions_of(rows))] = torch.from_numpy(own)
        found = found.to(trainer.world.device)
        dist.all_reduce(found)
        known = (found / trainer.layout.ranks).cpu().numpy()[: len(experience.action_mask)]
        experience.columns["ref_logprobs"] = known
        if trainer.world.rank == 0:
            unfinished = file.with_suffix(".tmp.npy")
            np.save(unfinished, known)
            unfinished.replace(file)
