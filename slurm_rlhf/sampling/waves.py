"""Samples in waves: what is sampled with what does not depend on time (train.full_determinism, rollout.engine = hf).

A wave begins when every open episode has ended or asks for its next turn. `Waves` deals it to engines by place,
`ActorWaves` to the ranks of the actor by length.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from concurrent.futures import Future

from slurm_rlhf.engine.engine import behind
from slurm_rlhf.errors import CallTimeout, RemoteError, RunError
from slurm_rlhf.sampling.batches import PromptGroup
from slurm_rlhf.sampling.scheduler import Answered, EngineWork, Scheduler, TurnRequest, nobody
from slurm_rlhf.wire.calls import ActorBatch, ActorCalls, GenerateAnswer, most_in_answer
from slurm_rlhf.wire.handles import EngineHandle, RoleHandle, gather


class Waves(Scheduler):
    """Gives engine p the places p, p + W, ... of a wave on W engines, in one message, before it takes a step.

    So the batch composition inside an engine, and with it the last bit of its log-probs, does not depend on time. The
    part of a lost engine goes as a whole to one that has done its own, though some of it may be there.
    """

    def __init__(self, rollout: EngineHandle, run_seed: int, width: int, answered: Answered = nobody) -> None:
        super().__init__(rollout, run_seed, width, answered)
        self._groups = 0  # groups since no episode was open
        self._open = 0  # episodes
        self._asking: list[TurnRequest] = []
        self._parts: dict[int, list[TurnRequest]] = {}  # parts that no engine has
        self._dealt: dict[int, tuple[int, list[TurnRequest]]] = {}  # engine -> the part that it has

    def place(self, group: PromptGroup, left: int | None = None) -> bool:
        if not self._open:
            self._groups = 0
        group.position = self._groups
        self._groups += 1
        self._open += group.sampling.n
        return True

    def ended(self) -> None:
        self._open -= 1
        self._flush_soon()

    def _take(self, request: TurnRequest) -> None:
        self._asking.append(request)
        self._flush_soon()

    def flush(self) -> None:
        if self._asking and len(self._asking) == self._open:
            asking, self._asking = self._asking, []
            self._deal(sorted(asking, key=lambda request: (request.group.position, request.asked.sample)))
        self._hand_out()
        super().flush()

    def _deal(self, wave: list[TurnRequest]) -> None:
        width = min(self.rollout.world, self._groups)
        for request in wave:
            self._parts.setdefault(request.group.position % width, []).append(request)

    def _hand_out(self) -> None:
        for engine in self.ready:
            if self._work(engine).owed:
                continue
            part = next((part for part in self._parts if part == engine or part not in self.ready), None)
            if part is not None:
                self._dealt[engine] = (part, self._parts.pop(part))
                for request in self._dealt[engine][1]:
                    self._hand(self._work(engine), request)

    def _lose(self, work: EngineWork) -> None:
        part, requests = self._dealt[work.engine]
        if work.owed:
            self._parts[part] = requests


class ActorWaves(Waves):
    """Samples with the ranks of the actor, which may have to take every step together.

    Each rank gets equally many batches in the same order, so that none waits for a step that another never takes.
    Batches may have different sizes, and be empty. Which rank gets which requests depends on the requests alone.
    """

    rollout: RoleHandle[ActorCalls]  # type: ignore[assignment]
    _calls: list[Future[GenerateAnswer]]  # calls of the wave

    @property
    def ready(self) -> Sequence[int]:
        return range(self.rollout.world)

    def stop(self) -> None:
        self.rollout.start_all(ActorCalls.drop)

    def _deal(self, wave: list[TurnRequest]) -> None:
        by = {(request.group.position, request.asked.sample): request for request in wave}
        lengths = {which: len(request.asked.token_ids) for which, request in by.items()}
        limit = max(request.asked.limit for request in wave)
        most = min(self._width, most_in_answer(max(lengths.values()), limit))
        rounds = deal(lengths, self.rollout.world, most)
        self._calls = []
        for number, batches in enumerate(rounds, start=1):
            works = [EngineWork(rank) for rank in range(len(batches))]
            for work, batch in zip(works, batches, strict=True):
                for which in batch:
                    self._hand(work, by[which])
            last, version = number == len(rounds), wave[0].group.state.version
            asked = [ActorBatch(self._batch(work.unsent, wave[0].group.sampling), version, last) for work in works]
            calls = self.rollout.start_each(ActorCalls.generate, asked)
            self._calls += calls
            for work, call in zip(works, calls, strict=True):
                self._watch(work, call)

    def _hand_out(self) -> None:
        pass

    def _failed(self, work: EngineWork, error: BaseException) -> None:
        """Name the rank that the others wait for, as far as heartbeats show it."""
        try:
            gather(self._calls)
        except (RemoteError, CallTimeout) as first:
            phases = self.rollout.phases()
            late = behind(phases)
            if not late or (isinstance(first, RemoteError) and first.user_error):
                raise
            names = "; ".join(f"{self.rollout.names(rank)} is behind, in {phases[rank]!r}" for rank in late[:4])
            raise RunError(
                f"sampling stopped: {names}, and the other ranks wait for it. First to give up: {first}"
            ) from first


Wanted = tuple[int, int]
"""Position of a group, number of the sample."""


def deal(lengths: Mapping[Wanted, int], ranks: int, most: int) -> list[list[list[Wanted]]]:
    """Deal responses to texts of `lengths` tokens to ranks: round -> rank -> at most `most` of them.

    Neighbours in length are sampled together, so that prompts have little padding; in a round the ranks have equally
    many responses, or one less. A rank that samples all responses to a prompt computes it once for them.
    """
    wanted = sorted(lengths, key=lambda which: (lengths[which], which))
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
