"""Ranks of the roles with a model of transformers: actor, critic, reference and reward."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from slurm_rlhf.config.roles import has_engines
from slurm_rlhf.config.schema import Config
from slurm_rlhf.ranks.actor_generation import ActorGeneration
from slurm_rlhf.ranks.worker import RankInfo, Worker
from slurm_rlhf.records import F32, SyncConnection, SyncReport
from slurm_rlhf.trainer._torch import attention_kernel
from slurm_rlhf.trainer.distributed import release_cache
from slurm_rlhf.trainer.frozen import FrozenPolicy, RewardModel
from slurm_rlhf.trainer.lora import base_model
from slurm_rlhf.trainer.optimizer_state import done
from slurm_rlhf.trainer.trainers import PolicyTrainer, ValueTrainer
from slurm_rlhf.weights.ends import ActorEnd
from slurm_rlhf.weights.group import abort_newest
from slurm_rlhf.wire.calls import (
    ActorBatch,
    ActorCalls,
    CriticCalls,
    ForwardBatch,
    GenerateAnswer,
    PassAnswer,
    PassRequest,
    ReferenceCalls,
    RewardCalls,
    SaveRequest,
    SelfCheckAnswer,
    StartAnswer,
    SyncGroupRequest,
    TrainAnswer,
    TrainBatch,
    TrainerCalls,
)
from slurm_rlhf.wire.client import ControlClient


class ModelWorker(Worker):
    """Works with a model of transformers.

    Where it shares its accelerator (train.colocate_all), no call leaves memory behind that the next role needs:
    PyTorch keeps what was freed for its own process, and the others would find the device full.
    """

    def attention(self) -> str:
        return attention_kernel()

    def perform(self, method: Callable[..., Any], arguments: list[Any]) -> Any:
        try:
            return super().perform(method, arguments)
        finally:
            if self.config.train.colocate_all:
                release_cache()


class TrainerWorker(ModelWorker, TrainerCalls):
    """Trains a model; `start` of a subclass sets `trainer`."""

    trainer: PolicyTrainer | ValueTrainer
    pending = done()

    def train_step(self, batch: TrainBatch) -> TrainAnswer:
        return TrainAnswer(self.trainer.train_step(batch.experience, batch.micro, batch.denominator))

    def measure(self, request: PassRequest) -> PassAnswer:
        return PassAnswer(*self.trainer.measure(request.experience, request.micro, request.backward))

    def save(self, request: SaveRequest) -> None:
        self.pending = self.trainer.save(Path(request.path), request.behind)

    def written(self) -> Future[None]:
        return self.pending

    def finish_save(self) -> None:
        wait([self.pending])

    def load(self, directory: str) -> None:
        self.trainer.load(Path(directory))

    def sleep(self) -> None:
        self.trainer.backend.move("host")

    def wake_up(self) -> None:
        self.trainer.backend.move("device")


class ActorWorker(TrainerWorker, ActorCalls):
    """Trains the policy."""

    trainer: PolicyTrainer

    def __init__(self, config: Config, info: RankInfo, client: ControlClient) -> None:
        super().__init__(config, info, client)
        self.sync = ActorEnd(config, f"{info.role} {info.rank}")

    def start(self, total_steps: int) -> StartAnswer:
        self.trainer = PolicyTrainer(self.config, total_steps)
        note = ""
        if not has_engines(self.config):
            self.generation = ActorGeneration(self.config, self.info, self.client, self.trainer)
            note = self.generation.note
        return StartAnswer(note, self.trainer.describe())

    def train_step(self, batch: TrainBatch) -> TrainAnswer:
        answer = super().train_step(batch)
        return replace(answer, logprobs=self.trainer.passed)

    def generate(self, batch: ActorBatch) -> GenerateAnswer:
        return self.generation.sample(batch)

    def drop(self) -> None:
        self.generation.sleep()

    def logprobs(self, batch: ForwardBatch) -> F32:
        return self.trainer.logprobs(batch.experience, batch.micro)["logprobs"]

    def reference_logprobs(self, batch: ForwardBatch) -> F32:
        with base_model(self.trainer.backend.module):
            return self.logprobs(batch)

    def self_check(self, batch: ForwardBatch) -> SelfCheckAnswer:
        return SelfCheckAnswer(**self.trainer.self_check(batch.experience, batch.micro))

    def export(self, directory: str) -> None:
        self.trainer.export_hf(Path(directory))

    def sync_listen(self, host: str) -> int:
        return self.sync.listen(host)

    def sync_join(self, request: SyncGroupRequest) -> SyncConnection:
        return self.sync.join(request.parameters, **request.described())

    def sync_abort(self) -> None:
        abort_newest("an engine was lost before the group was formed")

    def sync_push(self, version: int) -> SyncReport:
        return self.sync.push(self.trainer.local_parameters(), version)


class CriticWorker(TrainerWorker, CriticCalls):
    """Trains the value model."""

    trainer: ValueTrainer

    def start(self, total_steps: int) -> StartAnswer:
        self.trainer = ValueTrainer(self.config, total_steps)
        return StartAnswer(note=self.trainer.origin)

    def values(self, batch: ForwardBatch) -> F32:
        return self.trainer.values(batch.experience, batch.micro)["values"]


class ReferenceWorker(ModelWorker, ReferenceCalls):
    """Computes log-probs of the frozen policy that the KL penalty compares with."""

    def start(self, total_steps: int) -> StartAnswer:
        self.model = FrozenPolicy(self.config)
        return StartAnswer()

    def logprobs(self, batch: ForwardBatch) -> F32:
        return self.model.logprobs(batch.experience, batch.micro)["logprobs"]


class RewardWorker(ModelWorker, RewardCalls):
    """Scores whole responses with the reward model."""

    def start(self, total_steps: int) -> StartAnswer:
        self.model = RewardModel(self.config)
        return StartAnswer(note=self.model.description)

    def score(self, batch: ForwardBatch) -> F32:
        return self.model.score(batch.experience, batch.micro)
