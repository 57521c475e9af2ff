"""Ranks of the roles with a model of transformers: critic, reference, reward, and the actor, which may sample, too.

And a reward model in a worker of `slurm-rlhf serve-reward DIRECTORY`, without a process group.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace

from slurm_rlhf.algorithms.batching import shards
from slurm_rlhf.config.roles import has_engines
from slurm_rlhf.config.schema import Config
from slurm_rlhf.data.tokenizer import Tokenizer, encode_prompts
from slurm_rlhf.engine.engine import GATHERING, Engine, GenerateRequest, phase_of, requests_of
from slurm_rlhf.engine.hf import HfEngine
from slurm_rlhf.errors import RunError
from slurm_rlhf.placement.memory import gathers_once
from slurm_rlhf.ranks.worker import RankInfo, Worker
from slurm_rlhf.records import (
    F32,
    KV_CACHE,
    STOP,
    WEIGHTS,
    EngineLoad,
    Experience,
    SyncConnection,
    SyncReport,
    Trajectory,
)
from slurm_rlhf.rewards.items import Item
from slurm_rlhf.trainer._torch import attention_kernel
from slurm_rlhf.trainer.distributed import all_agree, device_bytes, release_cache
from slurm_rlhf.trainer.frozen import FrozenPolicy, RewardModel
from slurm_rlhf.trainer.generation import Generation
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
        self.pending = self.trainer.save(Path(request.path), request.async_save)

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
        return replace(answer, logprobs=self.trainer.used_logprobs)

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
        abort_newest()

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


DROP = ActorCalls.drop.__name__


class ActorGeneration:
    """Samples with the policy of `trainer`. All ranks get equally many calls, in the same order."""

    def __init__(self, config: Config, info: RankInfo, client: ControlClient, trainer: PolicyTrainer) -> None:
        """Collective: the ranks agree on how parameters are gathered."""
        world = trainer.world
        whole = all_agree(gathers_once(config, device_bytes(world.device)), world)
        self._client, self._info = client, info
        self._timeout_s = config.timeout.collective
        self._generation = Generation(trainer.backend, whole)
        tokenizer = Tokenizer.load(config.actor.model_name_or_path)
        self._engine: Engine = HfEngine(self._generation, tokenizer, world.device, info.rank, self._note)
        self._awake = False
        self._batch = 0  # calls so far

    @property
    def note(self) -> str:
        """Say how parameters are gathered."""
        how = "layer by layer, for each token" if not self._generation.whole else "once for the responses of a step"
        return f"actor: samples with transformers; parameters that ZeRO-3 has cut are gathered {how}"

    def sample(self, batch: ActorBatch) -> GenerateAnswer:
        """Sample the responses of a batch. Raises RunError, also where another rank does not answer in time."""
        self._batch += 1
        self._note(0, GATHERING)
        began = time.monotonic()
        try:
            self._wake(batch.version)
            requests = requests_of(batch.batch)
            found, steps = self._sample(requests)
        except RuntimeError as error:  # a collective's time-out, a lost connection, no memory
            self.sleep()
            raise RunError(
                f"rank {self._info.rank} of the actor, in {self._client.phase!r}: {error}{self._advice(error)}"
            ) from error
        if batch.last:
            self.sleep()
        sampled = [found[request.key] for request in requests if request.key in found]
        tokens = sum(len(one.response_ids) for one in sampled)
        busy = time.monotonic() - began if requests else 0.0
        return GenerateAnswer(sampled, EngineLoad(tokens, len(sampled), steps, busy))

    def sleep(self) -> None:
        """Give up gathered parameters."""
        if self._awake:
            self._awake = False
            self._engine.sleep()

    def _wake(self, version: int) -> None:
        """Have the engine sample with the present weights, which are of policy `version`."""
        if not self._awake:
            self._awake = True
            self._engine.wake(WEIGHTS)
            self._engine.load(self._generation.weights(), version)
            self._engine.wake(KV_CACHE)

    def _sample(self, requests: list[GenerateRequest]) -> tuple[dict[str, Trajectory], int]:
        """Step until no rank needs this one; return the responses, none if they were dropped, and own steps."""
        found: dict[str, Trajectory] = {}
        steps, left = 0, len(requests)
        for request in requests:
            self._engine.add(request)
        while True:
            if self._client.waits(DROP):
                self._engine.drop()
                found, left = {}, 0
            steps += left > 0
            for one in self._engine.step():
                found[one.key] = one
                left -= 1
            if not self._engine.status.unfinished:
                return found, steps

    def _advice(self, error: RuntimeError) -> str:
        if isinstance(error, torch.OutOfMemoryError):
            return ". Lower rollout.hf_max_num_seqs, or set rollout.hf_gather = layer"
        return f" (timeout.collective = {self._timeout_s:g} s)" if "timed out" in str(error).lower() else ""

    def _note(self, token: int, doing: int | str) -> None:
        self._client.phase = phase_of(self._batch, token, doing)


class ServedModel:
    """Holds a reward model on the GPU, or in fp32 on the CPU."""

    def __init__(self, path: str) -> None:
        """Load the model in the directory. Raises ModelError."""
        self.config = Config()
        self.config.reward.model_name_or_path = path
        if not torch.cuda.is_available():
            self.config.ds.param_dtype = "fp32"
        self.tokenizer = Tokenizer.load(Path(path))
        self.model = RewardModel(self.config)
        print(self.model.description, flush=True)

    def answer(self, items: list[Item], step: int) -> list[float]:
        """Score each item, [N]."""
        if not items:
            return []
        tokens = [self._tokens(item) for item in items]
        lengths = np.array([len(ids) - 1 for ids in tokens], dtype=np.int32)
        ones = np.ones(len(items))
        whole = Experience(
            lengths,
            ones.astype(np.int32),
            np.concatenate(tokens).astype(np.int32),
            ones.astype(np.bool_),
            ones.astype(np.float32),
        )
        (part,) = shards(whole, 1, self.config.train.forward_tokens, self.model.layout)
        scores = np.zeros(len(items), dtype=np.float32)
        scores[part.indices] = self.model.score(part.experience, part.micro)
        found: list[Any] = scores.tolist()
        return found

    def _tokens(self, item: Item) -> list[int]:
        """Return the tokens of prompt and response: those of the item, if they are of this model's tokenizer."""
        prompt, response = item["prompt_ids"], item["response_ids"]
        if response and self.tokenizer.response_text(prompt, response) == item["response"]:
            return [*prompt, *response]
        text = encode_prompts([item["prompt"] + item["response"]], self.tokenizer, False)[0]
        return [*text, self.tokenizer.eos_token_id] if item["finish_reason"] == STOP else text
