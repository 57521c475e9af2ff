"""The actor's ranks as samplers (rollout.engine = hf): one call is a batch of responses."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from slurm_rlhf.config.schema import Config
from slurm_rlhf.data.tokenizer import Tokenizer
from slurm_rlhf.engine.engine import GATHERING, Engine, GenerateRequest, phase_of, requests_of
from slurm_rlhf.engine.hf import HfEngine
from slurm_rlhf.errors import RunError
from slurm_rlhf.placement.memory import gathers_once
from slurm_rlhf.ranks.worker import RankInfo
from slurm_rlhf.records import KV_CACHE, WEIGHTS, EngineLoad, Trajectory
from slurm_rlhf.trainer.distributed import all_agree, device_bytes
from slurm_rlhf.trainer.generation import Generation
from slurm_rlhf.wire.calls import ActorBatch, ActorCalls, GenerateAnswer
from slurm_rlhf.wire.client import ControlClient

if TYPE_CHECKING:
    from slurm_rlhf.trainer.trainers import PolicyTrainer

DROP = ActorCalls.drop.__name__


class ActorGeneration:
    """Samples with the policy of `trainer`. Every rank is asked as often, in the same order."""

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
