"""The first rank of an engine: it takes the conductor's calls and feeds the engine between its steps."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress

import numpy as np
from torch import Tensor
from torch import distributed as dist

from slurm_rlhf.config.schema import Config
from slurm_rlhf.engine.engine import GenerateRequest, Meter, backend, requests_of
from slurm_rlhf.engine.tp_engine import EnginePlace, TpEngine, engine_store
from slurm_rlhf.errors import RunError
from slurm_rlhf.ranks.engine_follower import EngineFollower, EngineWorker, publish_address
from slurm_rlhf.ranks.follower_links import FollowerCalls, FollowerLinks, LocalListener
from slurm_rlhf.ranks.worker import RankInfo, Worker
from slurm_rlhf.records import EngineLoad, MemoryPart, Sampling, SyncConnection, SyncReport, Trajectory
from slurm_rlhf.wire import timeouts
from slurm_rlhf.wire.calls import (
    EngineCalls,
    GenerateAnswer,
    GenerateBatch,
    SamplingRequest,
    StartAnswer,
    SyncGroupRequest,
    WakeUpRequest,
    most_in_answer,
)
from slurm_rlhf.wire.client import ControlClient
from slurm_rlhf.wire.messages import FAILURE, Request, sendable

log = logging.getLogger(__name__)

_RECEIVE = EngineCalls.sync_receive.__name__

CallAnswer = Future[GenerateAnswer]


def make_engine_worker(config: Config, info: RankInfo, client: ControlClient) -> Worker:
    """Make the leader of an engine, or one of its followers."""
    follows = info.rank % config.vllm.tensor_parallel_size
    return (EngineFollower if follows else EngineLeader)(config, info, client)


class EngineLeader(EngineWorker, EngineCalls):
    """Runs the engine's step loop: it answers calls between two steps, never during one."""

    def __init__(self, config: Config, info: RankInfo, client: ControlClient) -> None:
        super().__init__(config, info, client)
        self.meter = Meter()
        self._calls: deque[tuple[CallAnswer, int]] = deque()  # call, and the fewest responses it is answered with
        self._open: set[str] = set()  # keys of the requests that the engine has
        self._finished: list[Trajectory] = []  # responses that no call has fetched yet
        self._error: Exception | None = None  # why requests were dropped while no call was open
        self._after_drain: list[Request] = []
        self._halted = False  # an update broke off under responses in flight: they wait for the next update
        self.followers: FollowerLinks | None = None
        self._settle: Callable[[], list[SyncReport]] = list  # `LeadingEngine.settle` if there are followers
        if self.place.tp > 1:
            self._store = engine_store(self.place, config.timeout.connect)
            self._listener = LocalListener(self.place.tp)
            self._identity = publish_address(self._store, config, self.place, self._listener.path)

    def start(self, total_steps: int) -> StartAnswer:
        if self.place.tp == 1:
            self.engine = backend(self.config).make_engine(self.config, self.place.engine)
            return StartAnswer(self.engine.note)
        streams = self._listener.accept_all(self.place, self.config.timeout.connect)
        self.followers = FollowerLinks(self.place, streams, self.config.timeout, self._broken)
        engine = LeadingEngine(self.config, self.place, self._store, self._identity, self.followers)
        self.engine, self._settle = engine, engine.settle
        return StartAnswer(engine.note)

    def _broken(self, reason: str) -> None:
        """End this process: its main thread may be inside a collective that never ends."""
        print(reason, file=sys.stderr, flush=True)
        self.client.event(FAILURE, reason=sendable(reason))
        timer = threading.Timer(timeouts.LAST_WORDS_S, os._exit, (1,))
        timer.daemon = True
        timer.start()

    def sync_join(self, request: SyncGroupRequest) -> SyncConnection:
        """Join together with the followers: `request.rank` is the rank of the leader, theirs come after it."""
        if self.followers is None:
            return self.join_group(request)
        self.followers.send(FollowerCalls.sync_join, request)
        answer = self.join_group(request)
        self.followers.finish(FollowerCalls.sync_join)
        return answer

    def sync_receive(self, version: int) -> SyncReport:
        """Take over the weights; if a follower's part broke off, return its report."""
        report = self.receive_weights(version)
        if not report.broken:
            report = next((answer for answer in self._settle() if answer.broken), report)
        self._halted = bool(self._open) and bool(report.broken)
        return report

    def attention(self) -> str:
        return self.engine.status.attention if hasattr(self, "engine") else ""

    def drop(self) -> None:
        """Drop what is in flight between two steps."""
        self._drop(RunError(f"{self.place} had to drop its requests"))
        self._error = None

    def sleep(self) -> int:
        """Give up the accelerator. Requests are in flight only if the run is being stopped: they are dropped."""
        self.drop()
        return self.engine.sleep()

    def wake_up(self, request: WakeUpRequest) -> None:
        self.engine.wake(request.part)

    def handle(self, request: Request) -> None:
        """Answer a call; new weights wait for the responses in flight, unless vllm.sync_mode is inflight."""
        if request.method == _RECEIVE and self._open and self.config.vllm.sync_mode == "drain":
            self._after_drain.append(request)
            return
        super().handle(request)

    def generate(self, batch: GenerateBatch) -> Future[GenerateAnswer]:
        """Queue requests. Calls are answered in their order with whatever has finished, whichever call asked for it."""
        answer: CallAnswer = Future()
        self._calls.append((answer, batch.least))
        try:
            if self._error is not None:
                raise self._error
            for request in requests_of(batch):
                self._open.add(request.key)
                self.engine.add(request)
        except Exception as error:
            self._drop(error)
        self._answer()
        return answer

    def measure(self, request: SamplingRequest) -> EngineLoad:
        self.meter.begin()
        for number in range(request.responses):
            sampling = Sampling(max_new_tokens=request.tokens)
            prompt = np.roll(request.token_ids, number)
            self.engine.add(GenerateRequest(f"measured {number}", 0, number, prompt, sampling, number))
        while self.engine.status.unfinished:
            self.meter.begin()
            finished = self.engine.step()
            self.meter.stepped(self.engine.status, len(finished))
        self.meter.rest()
        return self.meter.take()

    def busy(self) -> bool:
        return bool(self._open) and not self._halted

    def advance(self) -> None:
        """Take one engine step, and answer the calls that it completed."""
        if not self.busy():
            return
        self.meter.begin()
        try:
            finished = self.engine.step()
        except Exception as error:
            self._drop(error)
            return
        self.meter.stepped(self.engine.status, len(finished))
        self._open.difference_update(trajectory.key for trajectory in finished)
        self._finished += finished
        self._answer()
        self._drained()

    def _answer(self) -> None:
        """Answer the calls that may be answered: all of them once nothing is left to come."""
        while self._calls and (not self._open or len(self._finished) >= self._calls[0][1]):
            longest = (len(one.prompt_ids) for one in self._finished), (len(one.response_ids) for one in self._finished)
            count = most_in_answer(*(max(lengths, default=0) for lengths in longest))
            found, self._finished = self._finished[:count], self._finished[count:]
            self._calls.popleft()[0].set_result(GenerateAnswer(found, self.meter.take()))

    def _drained(self) -> None:
        """Answer the calls that waited for the last response, if that was it."""
        if not self._open:
            self.meter.rest()
        while self._after_drain and not self._open:
            super().handle(self._after_drain.pop(0))

    def _drop(self, error: Exception) -> None:
        """Fail all open calls, or the next one if none is open, and have the engine drop its requests."""
        self._error = None if self._calls or not self._open else error
        for answer, _ in self._calls:
            answer.set_exception(error)
        self._calls.clear()
        self._open.clear()
        self._finished.clear()
        try:
            self.engine.drop()
        except Exception:
            log.exception("%s: its engine could not drop its requests", self.place)
        self._drained()


class LeadingEngine(TpEngine):
    """Runs TP rank 0: an `Engine` that passes every call on to the other ranks.

    It returns no response before all ranks have confirmed its tokens.
    """

    def __init__(
        self, config: Config, place: EnginePlace, store: dist.Store, identity: str, followers: FollowerLinks
    ) -> None:
        """Start all ranks of the engine."""
        self._followers = followers
        followers.send(FollowerCalls.start)
        super().__init__(config, place, store, identity, followers.planned)
        followers.finish(FollowerCalls.start)

    def add(self, request: GenerateRequest) -> None:
        super().add(request)
        self._followers.send(FollowerCalls.add, request)

    def drop(self) -> None:
        super().drop()
        with suppress(RunError):  # the followers of a broken engine end by themselves
            self._followers.send(FollowerCalls.drop)

    def _step(self) -> list[Trajectory]:
        self._followers.send(FollowerCalls.step)
        finished = super()._step()
        if finished:
            self._followers.agree(self.tp_digest.digest(), self.tp_digest.batches)
        return finished

    def load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        self._followers.send(FollowerCalls.sync_receive, version)
        super().load(weights, version)
        self._ready.unusable = f"not all of its ranks have confirmed policy version {version}"

    def settle(self) -> list[SyncReport]:
        """Return what each follower answers to the update, once this rank has loaded it.

        Until all have answered the engine refuses to sample. Raises CallTimeout.
        """
        answers = self._followers.finish(FollowerCalls.sync_receive)
        if not any(answer.broken for answer in answers):
            self._ready.unusable = ""
        return answers

    def sleep(self) -> int:
        self._followers.send(FollowerCalls.sleep)
        freed = super().sleep()
        self._followers.finish(FollowerCalls.sleep)
        return freed

    def wake(self, part: MemoryPart) -> None:
        self._followers.send(FollowerCalls.wake_up, WakeUpRequest(part))
        super().wake(part)
        self._followers.finish(FollowerCalls.wake_up)

    def close(self) -> None:
        self._followers.send(FollowerCalls.leave)
        super().close()
