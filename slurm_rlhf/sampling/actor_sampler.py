"""Sampling with the actor's own ranks (rollout.engine = hf): no engines, and no weights to transfer."""

from __future__ import annotations

import itertools
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from slurm_rlhf.cluster.stop import StopRequested
from slurm_rlhf.engine.engine import behind
from slurm_rlhf.errors import CallTimeout, RemoteError, RunError
from slurm_rlhf.records import EngineLoad, Prompt, Sampling, Trajectory
from slurm_rlhf.sampling.dispatch import Answered, answer_sizes, nobody
from slurm_rlhf.wire.calls import ActorCalls, GenerateAnswer, PackedPrompts, PromptTokens, ResponseBatch
from slurm_rlhf.wire.handles import RoleHandle, gather

Wanted = tuple[int, int]
"""Position of a prompt, number of the sample."""


@dataclass(slots=True)
class ActorSampler:
    """Implements `Sampler` with the ranks of the actor, which may have to take every step together.

    Each rank gets equally many batches in the same order, so that none waits for a step that another never takes.
    Batches may have different sizes, and be empty. Which rank gets which prompts depends on the prompts alone.
    """

    actor: RoleHandle[ActorCalls]
    run_seed: int
    max_num_seqs: int  # number of responses that a rank works on at once
    answered: Answered = nobody
    loads: dict[int, EngineLoad] = field(default_factory=dict, init=False)

    def run(
        self, prompts: list[Prompt], sampling: Sampling, version: int, round: int | None = None
    ) -> list[Trajectory]:
        round = version if round is None else round
        self.loads = {rank: EngineLoad() for rank in range(self.actor.world)}
        lengths = [len(prompt.token_ids) for prompt in prompts]
        most = answer_sizes(self.max_num_seqs, max(lengths, default=0), sampling.max_new_tokens)[0]
        rounds = deal(lengths, sampling.n, self.actor.world, most)
        calls = []
        for number, batches in enumerate(rounds, start=1):
            last = number == len(rounds)
            asked = [self._batch(batch, prompts, sampling, (round, version), last) for batch in batches]
            calls.append(self.actor.start_each(ActorCalls.generate, asked))
            for call in calls[-1]:
                call.add_done_callback(self._tell)
        try:
            answers = gather([call for batches in calls for call in batches])
        except StopRequested:
            self.actor.start_all(ActorCalls.drop)
            raise
        except (RemoteError, CallTimeout) as error:
            raise self._named(error) from error
        found: dict[Wanted, Trajectory] = {}
        for number, answer in enumerate(answers):
            self.loads[number % self.actor.world].add(answer.load)
            found |= {(position, one.sample): one for position, one in answer.found}
        return [found[position, sample] for position in range(len(prompts)) for sample in range(sampling.n)]

    def _tell(self, call: Future[GenerateAnswer]) -> None:
        if not call.cancelled() and call.exception() is None:
            self.answered(len(call.result().found), call.result().load.tokens)

    def _batch(
        self, wanted: list[Wanted], prompts: list[Prompt], sampling: Sampling, numbers: tuple[int, int], last: bool
    ) -> ResponseBatch:
        rows = [PromptTokens(position, prompts[position].index, prompts[position].token_ids) for position, _ in wanted]
        samples = np.array([sample for _, sample in wanted], dtype=np.int32)
        return ResponseBatch(PackedPrompts.pack(rows), samples, sampling, self.run_seed, *numbers, last)

    def _named(self, error: RemoteError | CallTimeout) -> RunError:
        """Name the rank that the others wait for, as far as heartbeats show it."""
        phases = self.actor.phases()
        late = behind(phases)
        if not late or (isinstance(error, RemoteError) and error.user_error):
            return error
        names = "; ".join(f"{self.actor.names(rank)} is behind, in {phases[rank]!r}" for rank in late[:4])
        return RunError(f"sampling stopped: {names}, and the other ranks wait for it. First to give up: {error}")


def deal(lengths: list[int], samples: int, ranks: int, most: int) -> list[list[list[Wanted]]]:
    """Deal the responses to prompts of `lengths` tokens to ranks: round -> rank -> at most `most` of them.

    Neighbours in length are sampled together, so that prompts have little padding; in a round the ranks have equally
    many responses, or one less. A rank that samples all responses to a prompt computes it once for them.
    """
    order = sorted(range(len(lengths)), key=lambda position: lengths[position])
    wanted = [(position, sample) for position in order for sample in range(samples)]
    count = -(-len(wanted) // (ranks * most))
    size = -(-len(wanted) // max(count, 1))
    rounds = [wanted[begin : begin + size] for begin in range(0, len(wanted), max(size, 1))]
    return [_dealt(part, ranks) for part in rounds]


def _dealt(wanted: list[Wanted], ranks: int) -> list[list[Wanted]]:
    """Give rank r each prompt r, r + ranks, ... with its samples; if shares are uneven, two ranks divide a prompt."""
    number = {position: number for number, position in enumerate(dict.fromkeys(position for position, _ in wanted))}
    ordered = sorted(wanted, key=lambda one: (number[one[0]] % ranks, number[one[0]]))
    bounds = [len(wanted) * rank // ranks for rank in range(ranks + 1)]
    return [ordered[begin:end] for begin, end in itertools.pairwise(bounds)]
