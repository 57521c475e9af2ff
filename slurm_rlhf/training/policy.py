"""The actor on one rank: log-probs, optimizer steps of PPO, parameters for the engines, checkpoint and export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from slurm_rlhf.algorithms.losses import Metrics, PolicyInputs, entropy_bonus
from slurm_rlhf.algorithms.plugins import load_plugins
from slurm_rlhf.algorithms.registry import policy_loss_of
from slurm_rlhf.config.schema import Config
from slurm_rlhf.records import F32, Experience
from slurm_rlhf.training.collate import TokenBatch, action_mask, collate, column
from slurm_rlhf.training.deepspeed_engine import EngineConfig, loading
from slurm_rlhf.training.distributed import join_world, seed_rank
from slurm_rlhf.training.engine import TrainEngine
from slurm_rlhf.training.export import save_hf
from slurm_rlhf.training.forward import per_action, undisturbed
from slurm_rlhf.training.local_parameters import Holdings, Rounded, holdings
from slurm_rlhf.training.models import DTYPES, load_policy
from slurm_rlhf.training.parameters import describe
from slurm_rlhf.training.step import optimizer_step


class PolicyTrainer:
    """One rank of the actor. Every method is collective unless it says otherwise."""

    def __init__(self, config: Config, total_steps: int) -> None:
        """`total_steps`: optimizer steps of the whole run, for the schedule. Raises ModelError, ConfigError."""
        actor = config.actor
        self.config = config
        self.world = join_world(config.timeout.collective)
        seed_rank(config.train.seed, self.world.rank, config.train.full_determinism)
        with loading(config.ds, self.world) as ds:
            module = load_policy(
                actor.model_name_or_path,
                ds,
                config.train.logprob_chunk_tokens,
                actor.gradient_checkpointing_enable,
                max_len=config.data.max_len,
            )
        self.engine = TrainEngine(module, EngineConfig.of_actor(config, actor.learning_rate, total_steps), self.world)
        load_plugins(config.train.plugins)
        self.policy_loss = policy_loss_of(config.algo.advantage.estimator)
        self.clip_low, self.clip_high = actor.eps_clip_low_high or (actor.eps_clip, actor.eps_clip)

    def logprobs(self, exp: Experience, micro: list[list[int]]) -> dict[str, F32]:
        """{"logprobs": fp32 [A]} at the rollout temperature; micro-batches as rows of `exp`."""
        return {"logprobs": per_action(exp, micro, self.world.device, lambda batch: self._forward(batch)[0])}

    def self_check(self, exp: Experience, micro: list[list[int]]) -> dict[str, F32]:
        """`logprobs` in ways that must not matter, fp32 [A] each, as a typed answer for `controller.self_check`.

        first, again: the same micro-batches twice. eval: in eval mode. alone: every row a micro-batch of its own; every
        rank needs as many rows. Changes nothing, and draws no random number of the run's.
        """
        module = self.engine.module
        with undisturbed(module, self.world.device):
            found = {name: self.logprobs(exp, micro)["logprobs"] for name in ("first", "again")}
            found["alone"] = self.logprobs(exp, [[row] for row in range(len(exp))])["logprobs"]
            module.eval()
            found["eval"] = self.logprobs(exp, micro)["logprobs"]
        return found

    def train_step(self, exp: Experience, micro: list[list[int]], denominator: float) -> dict[str, float]:
        """One optimizer step on this rank's part `exp`, with columns `logprobs` (old) and `advantages`.

        `denominator`: policy tokens in the whole step, over all ranks. Answers this rank's sums of
        `algorithms.losses` over its actions, and `lr` and `grad_norm` (of the whole step). Raises RunError.
        """
        return optimizer_step(self.engine, exp, micro, lambda part: self._loss(part, denominator))

    def _loss(self, part: Experience, denominator: float) -> tuple[Tensor, Metrics]:
        device = self.world.device
        mask = action_mask(part, device)
        logprobs, entropy = self._forward(collate(part, device))
        loss, metrics = self.policy_loss(
            PolicyInputs(
                logprobs,
                column(part, "logprobs", device),
                column(part, "advantages", device),
                mask,
                part.response_lens.tolist(),
                column(part, "loss_weights", device) if "loss_weights" in part.columns else None,
                denominator,
                self.clip_low,
                self.clip_high,
            )
        )
        bonus, more = entropy_bonus(entropy, mask, denominator, self.config.actor.entropy_coef)
        return loss + bonus, metrics | more

    def _forward(self, batch: TokenBatch) -> tuple[Tensor, Tensor]:
        result: tuple[Tensor, Tensor] = self.engine(
            batch.input_ids,
            batch.action_index,
            batch.targets,
            self.config.rollout.temperature,
            self.config.actor.entropy_coef != 0.0,
        )
        return result

    def held(self) -> Holdings:
        """What this rank has of the parameters in `describe`; see `holdings`. Not collective."""
        return Rounded(holdings(self.engine.module.model, self.world.rank), DTYPES[self.config.ds.param_dtype])

    def describe(self) -> list[list[Any]]:
        """[[name, shape, dtype], ...] of the parameters, in layer order, tied ones once. Not collective."""
        return describe(self.engine.module.model, DTYPES[self.config.ds.param_dtype])

    def save(self, directory: Path) -> None:
        """State for an exact resume, into an existing or new directory that all ranks see."""
        self.engine.save(directory)

    def load(self, directory: Path) -> None:
        """Raises CheckpointError."""
        self.engine.load(directory)

    def export_hf(self, directory: Path) -> None:
        """Write the policy and its tokenizer as a Hugging Face directory. The previous one, if any, is replaced."""
        save_hf(self.engine.module.model, Path(self.config.actor.model_name_or_path), directory, self.world.rank)
