"""Decides which engine gets the next request. All requests of one turn of the event loop to an engine are one message.

Schedulers are used on the event loop of `Episodes`; `stop` alone is called on the main thread.

With train.full_determinism, and with rollout.engine = hf, batches must not depend on time, so requests go out in waves.
A wave begins when every open episode has ended or asks for its next turn. `Waves` deals it to engines by position,
`ActorWaves` to the ranks of the actor by length.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

from slurm_rlhf.engine.engine import behind
from slurm_rlhf.errors import CallTimeout, RemoteError, RunError
from slurm_rlhf.records import I32, EngineLoad, Sampling, Trajectory
from slurm_rlhf.sampling.batches import PromptGroup, allowance
from slurm_rlhf.wire.calls import (
    ActorBatch,
    ActorCalls,
    Asked,
    EngineCalls,
    GenerateAnswer,
    GenerateBatch,
    PackedPrompts,
    most_in_answer,
)
from slurm_rlhf.wire.handles import EngineHandle, RoleHandle, gather

Answered = Callable[[int, int], None]
"""Gets how many responses have come, and how many tokens were sampled meanwhile."""


def ignore_answer(responses: int, tokens: int) -> None:
    """Ignore the answer."""


@dataclass(slots=True, eq=False)
class TurnRequest:
    """Asks for the response of one turn of an episode, and holds the answer."""

    group: PromptGroup
    asked: Asked
    answer: asyncio.Future[Trajectory]

    @property
    def key(self) -> str:
        return str(self.asked.number)


@dataclass(slots=True, eq=False)
class EngineWork:
    """Holds what one engine was asked for and has not answered, from its start to its loss."""

    engine: int
    coming: int = 0  # episodes that it was given, and that have asked for nothing yet
    owed: dict[str, TurnRequest] = field(default_factory=dict)
    unsent: list[TurnRequest] = field(default_factory=list)  # requests of `owed` that were not sent yet
    calls: set[Future[GenerateAnswer]] = field(default_factory=set)
    lost: bool = False

    @property
    def held(self) -> int:
        """Count the responses that it owes."""
        return self.coming + len(self.owed)


class Scheduler:
    """Gives each group to the engine that owes the fewest responses, unless it has enough.

    All turns of a group go to its engine. The requests of a lost engine go to others before new groups do; the seeds
    are the requests' own, so the responses are the same.
    """

    def __init__(
        self, rollout: EngineHandle, run_seed: int, width: int, answered: Answered = ignore_answer, urgent: bool = False
    ) -> None:
        """`width`: sequences that an engine works on at once; `urgent`: each response is wanted as soon as it is there.

        A call costs as much as several responses: where none is urgent, an engine answers with an eighth of its width
        at a time. With its reserve of a quarter it has enough to do meanwhile.
        """
        self.rollout = rollout
        self.loads: dict[int, EngineLoad] = {}  # engine -> its work since the last `take_loads`
        self.post: Callable[..., None] = lambda task, *arguments: None
        """Has the loop do a task, from any thread; `Episodes` sets it."""
        self._run_seed, self._width, self._answered = run_seed, width, answered
        self._least = 1 if urgent else max(1, width // 8)
        self._numbers = itertools.count()
        self._works: dict[int, EngineWork] = {}
        self._waiting: list[TurnRequest] = []  # requests of lost engines
        self._flushing = False

    @property
    def ready(self) -> Sequence[int]:
        """List the engines that can be asked."""
        return self.rollout.ready

    def place(self, group: PromptGroup, left: int | None = None) -> bool:
        """Give a group to an engine; False: none has room.

        left: responses that are left to be sampled, with those of this group; None: more always follow.
        """
        if self._waiting or (work := self._free(group.sampling.n, left)) is None:
            return False
        group.work, work.coming = work, work.coming + group.sampling.n
        return True

    def ask(self, group: PromptGroup, sample: int, turn: int, token_ids: I32, limit: int) -> asyncio.Future[Trajectory]:
        """Ask for a response of at most `limit` tokens to `token_ids`."""
        asked = Asked(next(self._numbers), group.prompt.index, sample, group.round, turn, limit, token_ids)
        request = TurnRequest(group, asked, asyncio.get_running_loop().create_future())
        self._take(request)
        return request.answer

    def never_asks(self, group: PromptGroup) -> None:
        """Note that an episode of a group that was placed has ended before its first turn."""
        if group.work is not None:
            group.work.coming = max(0, group.work.coming - 1)

    def ended(self) -> None:
        """Note that an episode asks no more."""

    def forget(self) -> None:
        """Let the engines drop what they owe."""
        for work in self._works.values():
            work.lost = True
            if work.owed:
                self.rollout.call(work.engine, EngineCalls.drop)
        self._works, self._waiting = {}, []

    def stop(self) -> None:
        """Note, on the main thread, that a stop has come."""

    def take_loads(self) -> dict[int, EngineLoad]:
        """Return the work of engines since the last call."""
        taken, self.loads = self.loads, {}
        return {engine: EngineLoad() for engine in self.ready} | taken

    def flush(self) -> None:
        """Hand out waiting requests, send those that were not sent, and keep a call open for the answers."""
        self._flushing = False
        while self._waiting:
            group = self._waiting[0].group
            whole = [request for request in self._waiting if request.group is group]
            if (work := self._free(len(whole), None)) is None:
                break
            self._waiting = [request for request in self._waiting if request.group is not group]
            group.work = work
            for request in whole:
                self._hand(work, request)
        for work in list(self._works.values()):
            if work.unsent or (work.owed and not work.calls):
                self._send(work)

    def _take(self, request: TurnRequest) -> None:
        work = request.group.work
        assert work is not None
        if request.asked.turn == 0:
            work.coming = max(0, work.coming - 1)
        if work.lost:
            self._waiting.append(request)
        else:
            self._hand(work, request)
        self._flush_soon()

    def _flush_soon(self) -> None:
        if not self._flushing:
            self._flushing = True
            self.post(self.flush)

    def _hand(self, work: EngineWork, request: TurnRequest) -> None:
        work.owed[request.key] = request
        work.unsent.append(request)

    def _free(self, samples: int, left: int | None) -> EngineWork | None:
        """Return the work of the engine that owes the fewest responses, if it may take `samples` more."""
        if not self.ready:
            return None
        work = min((self._work(engine) for engine in self.ready), key=lambda work: work.held)
        most = allowance(samples if left is None else left, 1 if left is None else len(self.ready), self._width)
        return work if not work.held or work.held + samples <= most else None

    def _work(self, engine: int) -> EngineWork:
        return self._works.setdefault(engine, EngineWork(engine))

    def _send(self, work: EngineWork) -> None:
        """Send an engine its new requests; as long as it owes responses, at least one call is open."""
        sent, work.unsent = work.unsent, []
        for sampling, alike in itertools.groupby(sent, key=lambda request: request.group.sampling):
            self._call(work, list(alike), sampling)
        if work.owed and not work.calls:
            self._call(work, [], Sampling())

    def _call(self, work: EngineWork, requests: Sequence[TurnRequest], sampling: Sampling) -> None:
        self._watch(work, self.rollout.call(work.engine, EngineCalls.generate, self._batch(requests, sampling)))

    def _batch(self, requests: Sequence[TurnRequest], sampling: Sampling) -> GenerateBatch:
        """Make the message for requests with the same `sampling`."""
        asked = PackedPrompts.pack([request.asked for request in requests])
        return GenerateBatch(asked, sampling, self._run_seed, self._least)

    def _watch(self, work: EngineWork, call: Future[GenerateAnswer]) -> None:
        work.calls.add(call)
        call.add_done_callback(partial(self.post, self._answer, work))

    def _answer(self, work: EngineWork, call: Future[GenerateAnswer]) -> None:
        if call not in work.calls or work.lost:
            return  # another call has shown that the engine was lost, or all was forgotten
        work.calls.remove(call)
        if (error := call.exception()) is not None:
            self._failed(work, error)
            return
        answer = call.result()
        self.loads.setdefault(work.engine, EngineLoad()).add(answer.load)
        self._answered(len(answer.found), answer.load.tokens)
        for trajectory in answer.found:
            request = work.owed.pop(trajectory.key, None)
            if request is not None and not request.answer.done():
                request.answer.set_result(trajectory)
        self._flush_soon()

    def _failed(self, work: EngineWork, error: BaseException) -> None:
        """Keep the requests of a lost engine for others; raise any other error."""
        if not self.rollout.goes_on_without(work.engine, error):
            raise error
        work.lost = True
        del self._works[work.engine]
        self._lose(work)
        self._flush_soon()

    def _lose(self, work: EngineWork) -> None:
        self._waiting += [request for request in work.owed.values() if not request.answer.done()]


class Waves(Scheduler):
    """Gives engine p the places p, p + W, ... of a wave on W engines, in one message, before it takes a step.

    So the batch composition inside an engine, and with it the last bit of its log-probs, does not depend on time. All
    requests of a lost engine go to one that has finished its own, even those that the lost one had answered.
    """

    def __init__(self, rollout: EngineHandle, run_seed: int, width: int, answered: Answered = ignore_answer) -> None:
        super().__init__(rollout, run_seed, width, answered)
        self._groups = 0  # groups placed since no episode was open
        self._open = 0  # open episodes
        self._asking: list[TurnRequest] = []
        self._parts: dict[int, list[TurnRequest]] = {}  # number of a part -> its requests, while no engine has it
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
