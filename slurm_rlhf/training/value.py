"""The critic on one rank: values, optimizer steps, checkpoint."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from slurm_rlhf.algorithms.losses import Metrics, value_loss
from slurm_rlhf.config.reward import reward_statistics
from slurm_rlhf.config.roles import CRITIC, ROLES
from slurm_rlhf.config.schema import Config
from slurm_rlhf.records import F32, Experience
from slurm_rlhf.training.collate import TokenBatch, action_mask, collate, column
from slurm_rlhf.training.deepspeed_engine import EngineConfig, loading
from slurm_rlhf.training.distributed import join_world, seed_rank
from slurm_rlhf.training.engine import TrainEngine
from slurm_rlhf.training.forward import per_action
from slurm_rlhf.training.models import load_critic
from slurm_rlhf.training.step import optimizer_step


class ValueTrainer:
    """One rank of the critic. Every method is collective."""

    def __init__(self, config: Config, total_steps: int) -> None:
        """`total_steps`: optimizer steps of the whole run, for the schedule. Raises ModelError, ConfigError."""
        self.config = config
        self.world = join_world(config.timeout.collective)
        seed_rank(config.train.seed, self.world.rank, config.train.full_determinism)
        path = ROLES[CRITIC].model(config)[1]
        statistics = reward_statistics(path) if config.reward.normalize_enable else None
        recompute = config.actor.gradient_checkpointing_enable
        with loading(config.ds, self.world) as ds:
            module = load_critic(
                path, ds, config.train.seed, recompute, statistics=statistics, max_len=config.data.max_len
            )
        self.origin = f"critic: starts from {path}, " + (
            f"a reward model, and keeps its head ({module.head})" if module.head else "with a new head"
        )
        cfg = EngineConfig.of_actor(config, config.critic.learning_rate, total_steps)
        self.engine = TrainEngine(module, cfg, self.world)
        module.value_head.write_masters(self.engine.fragments(module.value_head))

    def values(self, exp: Experience, micro: list[list[int]]) -> dict[str, F32]:
        """{"values": fp32 [A]}, of the state before each response token; micro-batches as rows of `exp`."""
        return {"values": per_action(exp, micro, self.world.device, self._forward)}

    def train_step(self, exp: Experience, micro: list[list[int]], denominator: float) -> dict[str, float]:
        """One optimizer step on this rank's part `exp`, with columns `values` (old) and `returns`.

        `denominator`: policy tokens in the whole step, over all ranks. Answers this rank's sums of
        `algorithms.losses` over its actions, and `lr` and `grad_norm` (of the whole step). Raises RunError.
        """
        metrics = optimizer_step(self.engine, exp, micro, lambda part: self._loss(part, denominator))
        self._read_masters()
        return metrics

    def _loss(self, part: Experience, denominator: float) -> tuple[Tensor, Metrics]:
        device = self.world.device
        return value_loss(
            self._forward(collate(part, device)),
            column(part, "values", device),
            column(part, "returns", device),
            action_mask(part, device),
            denominator,
            self.config.critic.value_clip,
        )

    def _forward(self, batch: TokenBatch) -> Tensor:
        values: Tensor = self.engine(batch.input_ids, batch.action_index)
        return values

    def save(self, directory: Path) -> None:
        """State for an exact resume, into an existing or new directory that all ranks see."""
        self.engine.save(directory)

    def load(self, directory: Path) -> None:
        """Raises CheckpointError."""
        self.engine.load(directory)
        self._read_masters()

    def _read_masters(self) -> None:
        head = self.engine.module.value_head
        head.read_masters(self.engine.fragments(head))
