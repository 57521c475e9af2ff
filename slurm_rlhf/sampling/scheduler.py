"""Decides which engine gets the next request. What one turn of the loop asks of an engine is one message.

All of it is used on the loop of `Episodes` alone.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

from slurm_rlhf.records import I32, EngineLoad, Sampling, Trajectory
from slurm_rlhf.sampling.batches import PromptGroup
from slurm_rlhf.sampling.group_rules import allowance
from slurm_rlhf.wire.calls import Asked, EngineCalls, GenerateAnswer, GenerateBatch, PackedPrompts
from slurm_rlhf.wire.handles import EngineHandle

Answered = Callable[[int, int], None]
"""Gets how many responses have come, and how many tokens were sampled meanwhile."""


def nobody(responses: int, tokens: int) -> None:
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
    """Gives each group to the engine that owes least, and never more than an engine takes.

    All turns of a group go to its engine. The requests of a lost engine go to others before new groups do; the seeds
    are the requests' own, so the responses are the same.
    """

    def __init__(
        self, rollout: EngineHandle, run_seed: int, width: int, answered: Answered = nobody, urgent: bool = False
    ) -> None:
        """`width`: sequences that an engine works on at once; `urgent`: each response is wanted as soon as it is there.

        A call costs as much as several responses: where none is urgent, an engine answers with an eighth of its width
        at a time. With its reserve of a quarter it has enough to do meanwhile.
        """
        self.rollout = rollout
        self.loads: dict[int, EngineLoad] = {}  # engine -> its work since somebody has taken them
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
        """List those that can be asked."""
        return self.rollout.ready

    def place(self, group: PromptGroup, left: int | None = None) -> bool:
        """Give a group to an engine; False: none has room.

        left: responses that are left to be sampled, those of this group too; None: there is no end of them.
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
        """Hand out what was asked for, and come for the answers."""
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
        """Return the work of the engine that owes least, if it may take so many responses more."""
        if not self.ready:
            return None
        work = min((self._work(engine) for engine in self.ready), key=lambda work: work.held)
        most = allowance(samples if left is None else left, 1 if left is None else len(self.ready), self._width)
        return work if not work.held or work.held + samples <= most else None

    def _work(self, engine: int) -> EngineWork:
        return self._works.setdefault(engine, EngineWork(engine))

    def _send(self, work: EngineWork) -> None:
        """Send what an engine does not know of; one call at least is there for what it owes."""
        sent, work.unsent = work.unsent, []
        for sampling, alike in itertools.groupby(sent, key=lambda request: request.group.sampling):
            self._call(work, list(alike), sampling)
        if work.owed and not work.calls:
            self._call(work, [], Sampling())

    def _call(self, work: EngineWork, requests: Sequence[TurnRequest], sampling: Sampling) -> None:
        self._watch(work, self.rollout.call(work.engine, EngineCalls.generate, self._batch(requests, sampling)))

    def _batch(self, requests: Sequence[TurnRequest], sampling: Sampling) -> GenerateBatch:
        """Make the message for requests of one sampling."""
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
