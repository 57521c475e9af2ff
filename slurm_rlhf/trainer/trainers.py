"""The models that are trained, on one rank: policy and value model."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from slurm_rlhf.algorithms.lora import is_adapter
from slurm_rlhf.algorithms.losses import Metrics, PolicyInputs, entropy_bonus, kl_loss, nll_loss, value_loss
from slurm_rlhf.algorithms.policy_losses import clip_range
from slurm_rlhf.algorithms.registry import load_plugins, policy_loss_of
from slurm_rlhf.config.check import reward_statistics
from slurm_rlhf.config.roles import ACTOR, CRITIC, ROLES
from slurm_rlhf.config.schema import Config, Ds
from slurm_rlhf.records import F32, Experience, ParameterSpec
from slurm_rlhf.trainer.backends import loading, start_trainer
from slurm_rlhf.trainer.batch import TokenBatch, collate, column, in_order, optional_column, per_action, to_device
from slurm_rlhf.trainer.distributed import join_world, seed_rank, speed, undisturbed
from slurm_rlhf.trainer.export import save_hf
from slurm_rlhf.trainer.lora import attach
from slurm_rlhf.trainer.models import load_critic, load_policy
from slurm_rlhf.trainer.trainer import DTYPES, Schedule, TrainSettings
from slurm_rlhf.trainer.ulysses import sequence_group

LocalParameters = Mapping[str, tuple[int, Tensor]]
"""name -> (index of the first element in the flat parameter, this rank's elements [n]); tied parameters once."""


class TrainedModel(ABC):
    """Trains one model with its loss on one rank. Every method is collective unless it says otherwise."""

    def __init__(self, config: Config, schedule: Schedule, role: str = ACTOR) -> None:
        """Load the model of `role`. Raises ModelError, ConfigError."""
        self.config = config
        self.layout = ROLES[role].layout(config)
        self.world = join_world(config.timeout.collective, config.timeout.connect)
        self.group = sequence_group(self.world, config.ds.ulysses_size, config.timeout.collective)
        seed_rank(config.train.seed, self.world.rank, config.train.full_determinism)
        with loading(config.ds, self.world) as ds:
            module: Any = self._load(ds)
            if config.lora.rank:
                lora = config.lora
                attach(module.model, lora.rank, lora.alpha, lora.target_modules, config.train.seed)
        self.backend = start_trainer(module, TrainSettings(config, schedule, self.world.size), self.world)

    @abstractmethod
    def _load(self, ds: Ds) -> nn.Module:
        """Load the module with the settings `ds`."""

    @abstractmethod
    def _loss(self, part: Experience, denominator: float) -> tuple[Tensor, Metrics]:
        """Compute the loss of a micro-batch and the metrics of `algorithms.losses`."""

    def train_step(self, exp: Experience, micro: list[list[int]], denominator: float) -> dict[str, float]:
        """Take one optimizer step on this rank's part `exp`, with micro-batches as rows of it.

        Every rank needs as many. `denominator`: policy tokens in the whole step, over all ranks. Returns this rank's
        sums of the metrics over its actions (of ranks that share rows, its share of their sums), and `lr` and
        `grad_norm` of the whole step. Raises RunError.
        """
        sums: Metrics = {}
        for number, rows in enumerate(micro, start=1):
            loss, metrics = self._loss(exp.select(rows), denominator)
            self.backend.accumulate(loss, last=number == len(micro))
            sums = {name: sums[name] + value if name in sums else value for name, value in metrics.items()}
        stats = self.backend.step()
        shares = [value.double() / self.config.ds.ulysses_size for value in sums.values()]
        values = torch.stack(shares).tolist()  # one copy from the device for all
        return dict(zip(sums, values, strict=True)) | stats

    def _collate(self, part: Experience, read: NDArray[np.int64] | None = None) -> TokenBatch:
        return collate(part, self.world.device, packed=self.layout.packed, group=self.group, read=read)

    def _per_action(self, exp: Experience, micro: list[list[int]], answer: Callable[[TokenBatch], Tensor]) -> F32:
        return per_action(exp, micro, self.world.device, answer, self.layout.packed, self.group)

    def save(self, directory: Path, async_save: bool = False) -> Future[None]:
        """Write the state for an exact resume into a directory that all ranks see; `async_save`: see `Trainer.save`."""
        return self.backend.save(directory, async_save)

    def load(self, directory: Path) -> None:
        """Continue where `save` was called. Raises CheckpointError."""
        self.backend.load(directory)


class MeasuredModel(TrainedModel):
    """Adds a measurement of its speed, before the first step of a run, to a trained model: a mixin."""

    def measure(self, exp: Experience, micro: list[list[int]], backward: bool) -> tuple[float, float, float, float]:
        """Return the seconds of a pass over micro-batches, its CPU seconds per thread, and the two rates of `speed`.

        The seconds are medians of three passes.
        With `backward` it computes gradients and drops them; under ZeRO-3 it counts two more passes instead. Without
        `backward` the rates are 0. Nothing is changed.
        """
        gradients = backward and not self.backend.sharded
        wanted = [parameter for parameter in self.backend.module.parameters() if parameter.requires_grad]
        dtype = self.backend.cfg.autocast
        took = []
        with undisturbed(self.backend.module, self.world.device):
            for _ in range(3):
                start, busy = time.perf_counter(), time.process_time()
                for rows in micro:
                    batch = self._collate(exp.select(rows))
                    with (
                        torch.autocast(self.world.device.type, dtype, dtype is not None),
                        torch.set_grad_enabled(gradients),
                    ):
                        numbers = self._numbers(batch).sum()
                    if gradients:
                        torch.autograd.grad(numbers, wanted, allow_unused=True)
                took.append((time.perf_counter() - start, (time.process_time() - busy) / torch.get_num_threads()))
        times = 3 if backward and not gradients else 1
        seconds, busy = (times * median(each) for each in zip(*took, strict=True))
        return seconds, busy, *(speed(self.world) if backward else (0.0, 0.0))

    @abstractmethod
    def _numbers(self, batch: TokenBatch) -> Tensor:
        """Run the module's own forward pass, without the trainer around it: a number for each action."""


class LanguageModelTrainer(TrainedModel):
    """Trains the causal language model of the actor."""

    def _load(self, ds: Ds) -> nn.Module:
        return load_policy(
            self.config.actor.model_name_or_path,
            ds,
            self.config.train.logprob_chunk_tokens,
            self.config.checkpointing,
            max_len=self.config.data.max_len,
        )

    def export_hf(self, directory: Path) -> None:
        """Write the model and its tokenizer as a Hugging Face directory; an export already there is replaced."""
        model: Any = self.backend.module.model
        source = Path(self.config.actor.model_name_or_path)
        save_hf(model, self.backend.gathered(model), source, directory, self.world.rank)


class PolicyTrainer(LanguageModelTrainer, MeasuredModel):
    """Trains the policy on one rank of the actor. `train_step` needs the column `advantages`.

    Without a column `logprobs` the old log-probs are those of the update's own pass: the ratio is 1, and its gradient
    that of the log-probs. Then, and with algo.correction.bypass, `used_logprobs` has those of the last step, [A].
    """

    used_logprobs: F32 | None = None

    def __init__(self, config: Config, total_steps: int) -> None:
        """Load the model; `total_steps`: optimizer steps of the whole run. Raises ModelError, ConfigError."""
        super().__init__(config, Schedule.of(config, config.actor.learning_rate, total_steps))
        load_plugins(config.train.plugins)
        actor = config.actor
        self.policy_loss = policy_loss_of(config.algo.advantage.estimator, actor.policy_loss_type)
        self.clip_low, self.clip_high = clip_range(actor.policy_loss_type, actor.eps_clip_low_high, actor.eps_clip)

    def logprobs(self, exp: Experience, micro: list[list[int]]) -> dict[str, F32]:
        """Compute {"logprobs": fp32 [A]} at the rollout temperature; micro-batches as rows of `exp`."""
        return {"logprobs": self._per_action(exp, micro, lambda batch: self._forward(batch)[0])}

    def train_step(self, exp: Experience, micro: list[list[int]], denominator: float) -> dict[str, float]:
        """Take one optimizer step, as `TrainedModel.train_step`."""
        self._parts: list[Tensor] = []
        metrics = super().train_step(exp, micro, denominator)
        self.used_logprobs = in_order(exp, micro, self._parts) if self._parts else None
        return metrics

    def _old_logprobs(self, part: Experience, logprobs: Tensor) -> Tensor:
        """Return the old log-probs of the ratio: the column of `part`, else this pass, `logprobs`.

        The pass is kept if the actor has not computed log-probs before.
        """
        given = optional_column(part, "logprobs", self.world.device)
        if given is None or self.config.algo.correction.bypass:
            self._parts.append(logprobs.detach())
        return logprobs.detach() if given is None else given

    def self_check(self, exp: Experience, micro: list[list[int]]) -> dict[str, F32]:
        """Compute `logprobs` in ways that must not matter, fp32 [A] each; nothing is changed by it.

        first, again: the same micro-batches twice. eval: in eval mode. alone: every row a micro-batch of its own; every
        rank needs as many rows. No random number of the run is drawn.
        """
        module = self.backend.module
        with undisturbed(module, self.world.device):
            found = {name: self.logprobs(exp, micro)["logprobs"] for name in ("first", "again")}
            found["alone"] = self.logprobs(exp, [[row] for row in range(len(exp))])["logprobs"]
            module.eval()
            found["eval"] = self.logprobs(exp, micro)["logprobs"]
        return found

    def _loss(self, part: Experience, denominator: float) -> tuple[Tensor, Metrics]:
        actor, device = self.config.actor, self.world.device
        mask = to_device(part.action_mask, device)
        logprobs, entropy = self._forward(self._collate(part))
        loss, metrics = self.policy_loss(
            PolicyInputs(
                logprobs,
                self._old_logprobs(part, logprobs),
                column(part, "advantages", device),
                mask,
                part.response_lens.tolist(),
                optional_column(part, "loss_weights", device),
                denominator,
                self.clip_low,
                self.clip_high,
                actor.dual_clip,
                (actor.sapo_temperature_pos, actor.sapo_temperature_neg),
            )
        )
        weights = optional_column(part, "entropy_weights", device)
        bonus, more = entropy_bonus(entropy, mask, denominator, actor.entropy_coef, weights)
        loss, metrics = loss + bonus, metrics | more
        for term, more in self._terms(part, logprobs, mask, denominator):
            loss, metrics = loss + term, metrics | more
        return loss, metrics

    def _terms(
        self, part: Experience, logprobs: Tensor, mask: Tensor, denominator: float
    ) -> Iterator[tuple[Tensor, Metrics]]:
        """Compute the further terms of the loss for which `part` has a column of weights."""
        config, device = self.config, self.world.device
        if (weights := optional_column(part, "kl_weights", device)) is not None:
            reference = column(part, "ref_logprobs", device)
            yield kl_loss(logprobs, reference, mask, denominator, weights, config.algo.kl.estimator)
        if (weights := optional_column(part, "nll_weights", device)) is not None:
            yield nll_loss(logprobs, mask, weights, config.actor.nll_coef)

    def _numbers(self, batch: TokenBatch) -> Tensor:
        logprobs: Tensor = self.backend.module(batch.input_ids, batch.action_index, batch.targets, row=batch.row)[0]
        return logprobs

    def _forward(self, batch: TokenBatch) -> tuple[Tensor, Tensor]:
        logprobs, entropy = self.backend.forward(
            batch.input_ids,
            batch.action_index,
            batch.targets,
            self.config.rollout.temperature,
            self.config.actor.entropy_coef != 0.0,
            row=batch.row,
        )
        return batch.whole(logprobs), batch.whole(entropy)

    def local_parameters(self) -> LocalParameters:
        """Return what this rank has of the parameters in `describe`. Not collective."""
        held = self.backend.shards(self.backend.module.model, "parameters")
        return {one.name: (one.start, one.tensors["parameter"]) for one in held if self._is_sent(one.name)}

    def describe(self) -> list[ParameterSpec]:
        """Describe the parameters that the engines get, in layer order, tied ones once. Not collective."""
        dtype = str(DTYPES[self.config.ds.param_dtype]).removeprefix("torch.")
        shapes = {name.removeprefix("model."): list(shape) for name, shape in self.backend.shapes.items()}
        return [ParameterSpec(name, shape, dtype) for name, shape in shapes.items() if self._is_sent(name)]

    def _is_sent(self, name: str) -> bool:
        """Tell whether the engines get the parameter at an update: with lora.rank those of the adapter alone."""
        return not self.config.lora.rank or is_adapter(name)


class HeadTrainer(TrainedModel):
    """Trains the body of a language model and one linear output, `ValueHead`, on it."""

    _statistics: tuple[float, float] | None = None  # mean and std by which a reward model's scores are normalised

    def __init__(self, config: Config, schedule: Schedule, role: str = ACTOR) -> None:
        self._path = ROLES[role].model(config)[1]
        super().__init__(config, schedule, role)
        head = self.backend.module.value_head
        head.write_masters(self.backend.shards(head, "optimizer"))

    def _load(self, ds: Ds) -> nn.Module:
        config = self.config
        return load_critic(
            self._path,
            ds,
            config.train.seed,
            config.checkpointing,
            statistics=self._statistics,
            max_len=config.data.max_len,
        )

    def train_step(self, exp: Experience, micro: list[list[int]], denominator: float) -> dict[str, float]:
        """Take a step as `TrainedModel.train_step`, and compute values with the new masters of the head."""
        metrics = super().train_step(exp, micro, denominator)
        self._read_masters()
        return metrics

    def load(self, directory: Path) -> None:
        """Continue where `save` was called, with the saved masters of the head. Raises CheckpointError."""
        super().load(directory)
        self._read_masters()

    def _read_masters(self) -> None:
        head = self.backend.module.value_head
        head.read_masters(self.backend.shards(head, "optimizer"))


class ValueTrainer(HeadTrainer, MeasuredModel):
    """Trains the value model on one rank of the critic. `train_step` needs the columns `values` (old) and `returns`."""

    def __init__(self, config: Config, total_steps: int) -> None:
        """Load the model; `total_steps`: optimizer steps of the whole run. Raises ModelError, ConfigError."""
        path = ROLES[CRITIC].model(config)[1]
        self._statistics = reward_statistics(path) if config.reward.normalize_enable else None
        super().__init__(config, Schedule.of(config, config.critic.learning_rate, total_steps), CRITIC)
        module = self.backend.module
        self.origin = f"critic: starts from {path}, " + (
            f"a reward model, and keeps its head ({module.head})" if module.head else "with a new head"
        )

    def values(self, exp: Experience, micro: list[list[int]]) -> dict[str, F32]:
        """Compute {"values": fp32 [A]} of the state before each response token; micro-batches as rows of `exp`."""
        return {"values": self._per_action(exp, micro, self._forward)}

    def _loss(self, part: Experience, denominator: float) -> tuple[Tensor, Metrics]:
        device = self.world.device
        return value_loss(
            self._forward(self._collate(part)),
            column(part, "values", device),
            column(part, "returns", device),
            to_device(part.action_mask, device),
            denominator,
            self.config.critic.value_clip,
        )

    def _numbers(self, batch: TokenBatch) -> Tensor:
        values: Tensor = self.backend.module(batch.input_ids, batch.action_index, row=batch.row)
        return values

    def _forward(self, batch: TokenBatch) -> Tensor:
        return batch.whole(self.backend.forward(batch.input_ids, batch.action_index, row=batch.row))
