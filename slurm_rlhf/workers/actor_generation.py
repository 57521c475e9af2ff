"""The actor's ranks as samplers (rollout.engine = hf): one call is a batch of responses."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from slurm_rlhf.config.schema import Config
from slurm_rlhf.control.calls import ActorCalls, GenerateAnswer, PromptTokens, ResponseBatch, Sampled
from slurm_rlhf.control.client import ControlClient
from slurm_rlhf.control.generation_phase import GATHERING, SAMPLING, WAITING, phase_of
from slurm_rlhf.errors import RunError
from slurm_rlhf.placement.memory import gathers_once
from slurm_rlhf.records import EngineLoad
from slurm_rlhf.rollout.engine import GenerateRequest, request_seed
from slurm_rlhf.rollout.hf_generation import HfSampler, Vocabulary
from slurm_rlhf.training.distributed import all_agree, device_bytes
from slurm_rlhf.training.generation import Generation
from slurm_rlhf.workers.worker import RankInfo

if TYPE_CHECKING:
    from slurm_rlhf.training.trainers import PolicyTrainer

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
        self._vocabulary = Vocabulary.read(config.actor.model_name_or_path)
        self._sampler = HfSampler(
            self._vocabulary, world.device, info.rank, self._generation.collective, self._told, self._dropped
        )
        self._batch = 0  # calls so far
        self._token = 0  # steps of the batch so far
        self._ended = False  # all of its responses on this rank

    @property
    def note(self) -> str:
        """Say how parameters are gathered."""
        how = "layer by layer, for each token" if not self._generation.whole else "once for the responses of a step"
        return f"actor: samples with transformers; parameters that ZeRO-3 has cut are gathered {how}"

    def run(self, batch: ResponseBatch) -> GenerateAnswer:
        """Sample the responses of a batch. Raises RunError, also where another rank does not answer in time."""
        self._batch, self._token, self._ended = self._batch + 1, 0, False
        self._note(GATHERING)
        began = time.monotonic()
        requests = [
            self._request(batch, prompt, sample)
            for prompt, sample in zip(batch.prompts, batch.samples.tolist(), strict=True)
        ]
        try:
            with self._generation.model(self) as model:
                found, steps = self._sampler.sample(model, requests, batch.version)
        except RuntimeError as error:  # of a collective that has run into its deadline, of a lost connection, of memory
            self.release()
            raise RunError(
                f"rank {self._info.rank} of the actor, in {self._client.phase!r}: {error}{self._advice(error)}"
            ) from error
        if batch.last:
            self.release()
        positions = [prompt.position for prompt in batch.prompts]
        sampled = [Sampled(position, one) for position, one in zip(positions, found, strict=False)]
        tokens = sum(len(trajectory.response_ids) for trajectory in found)
        busy = time.monotonic() - began if requests else 0.0
        return GenerateAnswer(sampled, EngineLoad(tokens, len(found), steps if requests else 0, busy))

    def release(self) -> None:
        """Give up gathered parameters."""
        self._generation.release()

    def _advice(self, error: RuntimeError) -> str:
        if isinstance(error, torch.OutOfMemoryError):
            return ". Lower rollout.hf_max_num_seqs, or set rollout.hf_gather = layer"
        return f" (timeout.collective = {self._timeout_s:g} s)" if "timed out" in str(error).lower() else ""

    def _request(self, batch: ResponseBatch, prompt: PromptTokens, sample: int) -> GenerateRequest:
        _, index, token_ids = prompt
        seed = request_seed(batch.run_seed, index, sample, batch.round)
        return GenerateRequest(f"{index}.{sample}", index, sample, token_ids, batch.sampling, seed)

    def layer(self, number: int) -> None:
        """See `Watch`."""
        self._client.phase = phase_of(self._batch, self._token + 1, number)

    def stepped(self) -> None:
        """See `Watch`."""
        self._token += 1
        self._note(WAITING if self._ended else SAMPLING)

    def _told(self, chosen: bool, ended: bool) -> None:
        if not chosen and not self._generation.collective:
            self._token += 1
        self._ended = ended
        self._note(WAITING if chosen else SAMPLING)

    def _note(self, what: str) -> None:
        self._client.phase = phase_of(self._batch, self._token, what)

    def _dropped(self) -> bool:
        return self._client.waits(DROP)
