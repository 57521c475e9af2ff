"""The stages, a data set and a loss each: `slurm-rlhf sft`, `rm` and `dpo`.

SFT makes the answers of examples likelier. A reward model gives the chosen answer of a pair the higher score. DPO, IPO,
SimPO and ORPO train on pairs of answers, KTO on answers alone.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from slurm_rlhf.algorithms.batching import cut_batch
from slurm_rlhf.algorithms.losses import Metrics
from slurm_rlhf.algorithms.packed import masked_sum, response_sums
from slurm_rlhf.algorithms.preferences import KTO, LOSSES, WITHOUT_REFERENCE, Pairs, bradley_terry, judged, kto, kto_kl
from slurm_rlhf.config.keys import get
from slurm_rlhf.config.schema import Config, Data, Ds
from slurm_rlhf.data.tokenizer import Tokenizer
from slurm_rlhf.records import F32, Experience, joined
from slurm_rlhf.stages.examples import Examples, fingerprint, load_examples, load_judged, load_pairs
from slurm_rlhf.stages.record import StageRecord, StopSignals
from slurm_rlhf.trainer.batch import to_device
from slurm_rlhf.trainer.distributed import barrier, undisturbed
from slurm_rlhf.trainer.export import classifier, save_reward
from slurm_rlhf.trainer.frozen import last_token
from slurm_rlhf.trainer.trainer import Schedule
from slurm_rlhf.trainer.trainers import HeadTrainer, LanguageModelTrainer, TrainedModel


class StageTrainer(TrainedModel):
    """Trains the model of a stage on one rank: a mixin for the class of the kind of model."""

    name: ClassVar[str]
    """Name of its command, of its group of keys, and of the model's state in a checkpoint."""
    measures_always: ClassVar[bool] = False
    """True: without an eval_dataset the model is measured by the examples that it was trained on."""

    def __init__(self, config: Config, total_steps: int) -> None:
        keys = get(config, self.name)
        super().__init__(config, Schedule.of(config, keys.learning_rate, total_steps, keys.lr_scheduler))

    @staticmethod
    @abstractmethod
    def read(path: Path, tokenizer: Tokenizer, data: Data) -> Examples:
        """Read the examples. Raises DataError."""

    def denominator(self, batch: Experience) -> float:
        """Return what the sums of an optimizer step are divided by, for its loss and its metrics: the pairs in it."""
        return len(batch) / 2

    def prepare(self, examples: Examples, record: StageRecord, signals: StopSignals) -> bool:
        """Compute what the loss needs of the model before it is trained; False: it has to stop first. Collective."""
        return True

    def stops(self, record: StageRecord, signals: StopSignals) -> bool:
        """Tell whether any rank has got a signal to stop, or the file STOP_FILE is there. Collective."""
        # A signal may reach one rank first: all of them stop at the same place.
        asked = signals.reason is not None or (self.world.rank == 0 and record.asked)
        total = torch.tensor(float(asked), device=self.world.device)
        dist.all_reduce(total)
        return bool(total)

    @abstractmethod
    def export_hf(self, directory: Path) -> None:
        """Write the model and its tokenizer as a Hugging Face directory; an export already there is replaced."""

    def micro_batches(self, batch: Experience, examples: Examples) -> list[list[int]]:
        """Return this rank's micro-batches, as rows of `batch`; the rows of an example stay together."""
        layout, lengths = self.layout, examples.lengths(batch, self.layout.packed)
        _, micros = cut_batch(lengths, self.world.size, self.config.train.max_tokens_per_gpu, layout)
        return [examples.rows(micro) for micro in micros[self.world.rank // layout.ranks]]

    def of_all(self, examples: Examples, answer: Callable[[Experience], Tensor], of_rows: bool) -> F32:
        """Compute fp32 numbers of all examples in eval mode, the same on every rank: [A], or [N] with `of_rows`.

        `answer` computes those of a micro-batch. Collective.
        """
        module, experience = self.backend.module, examples.experience
        ranks = self.world.size // self.layout.ranks
        last = experience.select(examples.rows([len(examples) - 1]))
        whole = joined([experience, *[last] * (-len(examples) % ranks)])
        found = torch.zeros(len(whole) if of_rows else len(whole.action_mask))
        with undisturbed(module, self.world.device), torch.no_grad():
            module.eval()
            for rows in self.micro_batches(whole, examples):
                at = rows if of_rows else torch.from_numpy(whole.actions_of(rows))
                found[at] = answer(whole.select(rows)).float().cpu()
        found = found.to(self.world.device)
        dist.all_reduce(found)
        known: F32 = (found / self.layout.ranks).cpu().numpy()
        return known[: len(experience if of_rows else experience.action_mask)]

    @abstractmethod
    def measured(self, examples: Examples) -> dict[str, float]:
        """Measure the model by examples: the mean loss, and more, the same on every rank. Collective."""


class AnswerTrainer(LanguageModelTrainer, StageTrainer):
    """Trains a language model on answers."""

    def logprobs(self, part: Experience) -> Tensor:
        """Compute the log-probs of the answers of a micro-batch, fp32 [A]. Collective."""
        batch = self._collate(part)
        logprobs: Tensor = self.backend.forward(batch.input_ids, batch.action_index, batch.targets, row=batch.row)[0]
        return batch.whole(logprobs)


class SftTrainer(AnswerTrainer):
    """Trains the answers of examples on one rank, those of `sft.dataset`."""

    name = "sft"
    read = staticmethod(load_examples)

    def denominator(self, batch: Experience) -> float:
        """Count the tokens of the assistant."""
        return float(batch.action_mask.sum())

    def _loss(self, part: Experience, denominator: float) -> tuple[Tensor, Metrics]:
        """Sum the cross-entropy of this micro-batch's answers, divided by the answer tokens of the whole step."""
        logprobs = self.logprobs(part)
        total = -masked_sum(logprobs, to_device(part.action_mask, logprobs.device))
        return total / denominator, {"loss": total.detach()}

    def measured(self, examples: Examples) -> dict[str, float]:
        logprobs = self.of_all(examples, self.logprobs, of_rows=False)[examples.experience.action_mask]
        return {"loss": -float(logprobs.mean(dtype=np.float64))}


class RmTrainer(StageTrainer, HeadTrainer):
    """Trains scores on one rank, at the token where transformers' sequence classification has them."""

    name = "rm"
    measures_always = True  # the export normalises scores by what is measured

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
        # A score is no probability: without this vLLM takes its sigmoid.
        settings = {"pad_token_id": self.pad, "problem_type": "regression", **self.statistics}
        source = Path(self.config.actor.model_name_or_path)
        save_reward(module.model, backend.gathered(module.model), head, settings, source, directory, rank)


class DpoTrainer(AnswerTrainer):
    """Trains on pairs of answers on one rank; with a reference, `train_step` needs the column `ref_logprobs`."""

    name = "dpo"

    @staticmethod
    def read(path: Path, tokenizer: Tokenizer, data: Data) -> Examples:
        return load_pairs(path, tokenizer, data)

    def _sums(self, part: Experience, logprobs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log-probs of whole answers by the policy, with gradient, and by the reference, fp32 [N] each.

        `logprobs` [A]: by the policy.
        """
        device = logprobs.device
        owner = torch.from_numpy(np.repeat(np.arange(len(part)), part.response_lens)).to(device)
        sums = torch.zeros(len(part), device=device).index_add(0, owner, logprobs.float())
        reference = torch.zeros(len(part), device=device)
        if "ref_logprobs" in part.columns:
            known = response_sums(part.columns["ref_logprobs"], part.action_mask, part.action_offsets)
            reference = torch.from_numpy(known).to(device, torch.float32)
        return sums, reference

    def _loss(self, part: Experience, denominator: float) -> tuple[Tensor, Metrics]:
        """Add up the losses of this micro-batch's pairs, divided by the pairs of the whole step."""
        loss, metrics = self._judged(part, self.logprobs(part))
        return loss / denominator, metrics

    def measured(self, examples: Examples) -> dict[str, float]:
        logprobs = torch.from_numpy(self.of_all(examples, self.logprobs, of_rows=False))
        metrics = self._of_whole(examples.experience, logprobs)
        return {name: float(value) / len(examples) for name, value in metrics.items()}

    def _of_whole(self, whole: Experience, logprobs: Tensor) -> Metrics:
        """Add up the metrics of all examples; `logprobs` [A]: by the policy."""
        return self._judged(whole, logprobs)[1]

    def _judged(self, part: Experience, logprobs: Tensor) -> tuple[Tensor, Metrics]:
        """Add up the losses and the metrics of pairs; `logprobs` [A]: by the policy."""
        keys = self.config.dpo
        sums, reference = self._sums(part, logprobs)
        tokens = torch.from_numpy(part.response_lens).to(logprobs.device, torch.float32)
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
        return loss, metrics

    def prepare(self, examples: Examples, record: StageRecord, signals: StopSignals) -> bool:
        """Compute the log-probs of the reference, which is the model as it starts, or read those of an earlier start.

        They are kept next to the checkpoint, under a hash of the model and the examples, by which directories next to
        it find them, too.
        """
        config, columns = self.config, examples.experience.columns
        if config.dpo.loss_type in WITHOUT_REFERENCE:
            return True
        (model,) = record.model.values()
        name = f"reference-{model[:16]}-{fingerprint(examples)[:16]}-{config.ds.param_dtype}.npy"
        file = record.root / name
        known = [path for path in (file, *sorted(record.root.parent.glob(f"*.run/{name}"))) if path.is_file()]
        there = torch.tensor([float(bool(known))], device=self.world.device)
        dist.all_reduce(there)  # a file system may show it to some ranks later
        if there == self.world.size:
            columns["ref_logprobs"] = np.load(known[0])
            return True
        parts = file.with_suffix(".parts")
        found = self._reference(examples, parts, record, signals)
        if found is None:
            return False
        columns["ref_logprobs"] = found
        if self.world.rank == 0:
            unfinished = file.with_suffix(".tmp.npy")
            np.save(unfinished, found)
            unfinished.replace(file)
            parts.unlink()
        return True

    def _reference(
        self, examples: Examples, parts: Path, record: StageRecord, signals: StopSignals
    ) -> NDArray[np.float32] | None:
        """Compute log-probs, of as many examples at a time as a step has, and append them to the file `parts`.

        Goes on after those that an earlier start has left there. None: it has to stop.
        """
        whole, many = examples.experience, len(examples)
        begins = whole.action_offsets[:: examples.width]
        kept = torch.tensor(parts.stat().st_size // 4 if parts.is_file() else 0, device=self.world.device)
        dist.all_reduce(kept, dist.ReduceOp.MIN)
        first = int(np.searchsorted(begins, int(kept), side="right")) - 1
        found = [np.fromfile(parts, np.float32, int(begins[first]))] if first else []
        record.say(f"computing the reference's log-probs of {many - first} examples, once")
        barrier()
        if self.world.rank == 0:
            with parts.open("ab") as file:
                file.truncate(4 * int(begins[first]))
        while first < many:
            if self.stops(record, signals):
                return None
            some = range(first, min(first + self.config.dpo.batch_size, many))
            piece = Examples(whole.select(examples.rows(some)), examples.width, [], [], [])
            found.append(self.of_all(piece, self.logprobs, of_rows=False))
            if self.world.rank == 0:
                with parts.open("ab") as file:
                    file.write(found[-1].tobytes())
            first = some.stop
        return np.concatenate(found)


class KtoTrainer(DpoTrainer):
    """Trains on answers that are called good or bad: `examples.load_judged`."""

    read = staticmethod(load_judged)
    _kl = 0.0  # the divergence from the reference, over the whole step

    def train_step(self, exp: Experience, micro: list[list[int]], denominator: float) -> dict[str, float]:
        """Estimate the divergence by answers to other prompts, the odd rows, and train the even ones."""
        total = torch.zeros((), device=self.world.device)
        with torch.no_grad():
            for rows in micro:
                part = exp.select([row for row in rows if row % 2])
                sums, reference = self._sums(part, self.logprobs(part))
                total += (sums - reference).sum()
        dist.all_reduce(total)
        self._kl = kto_kl(float(total) / self.layout.ranks, int(denominator))
        return super().train_step(exp, [[row for row in rows if row % 2 == 0] for rows in micro], denominator)

    def _of_whole(self, whole: Experience, logprobs: Tensor) -> Metrics:
        sums, reference = self._sums(whole, logprobs)
        self._kl = kto_kl(float((sums - reference)[1::2].sum()), len(whole) // 2)
        even = list(range(0, len(whole), 2))
        return self._judged(whole.select(even), logprobs[torch.from_numpy(whole.actions_of(even))])[1]

    def _judged(self, part: Experience, logprobs: Tensor) -> tuple[Tensor, Metrics]:
        """Add up the losses and the metrics of answers; `logprobs` [A]: by the policy."""
        keys, device = self.config.dpo, logprobs.device
        sums, reference = self._sums(part, logprobs)
        good = torch.from_numpy(part.rewards).to(device)
        ratio, kl = sums - reference, torch.tensor(self._kl, device=device)
        loss = kto(ratio, good, kl, keys.beta, (keys.desirable_weight, keys.undesirable_weight)).sum()
        margin = keys.beta * (2 * good - 1) * ratio.detach()
        preferred = (margin > 0).float().sum()
        metrics = {"loss": loss.detach(), "kto_kl": kl * len(part), "preferred": preferred, "margin": margin.sum()}
        return loss, metrics


def stage_trainer(config: Config, name: str) -> type[StageTrainer]:
    """Return the trainer of the stage `name`."""
    dpo = KtoTrainer if config.dpo.loss_type == KTO else DpoTrainer
    return {"sft": SftTrainer, "rm": RmTrainer, "dpo": dpo}[name]
