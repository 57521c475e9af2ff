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
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from slurm_rlhf.config.schema import Config
from slurm_rlhf.engine.engine import GenerateRequest, Meter, backend, request_seed
from slurm_rlhf.engine.tp_engine import EnginePlace, TpEngine, engine_store
from slurm_rlhf.errors import CallTimeout, RunError
from slurm_rlhf.ranks.engine_follower import EngineFollower, EngineWorker, publish_address
from slurm_rlhf.ranks.follower_links import FollowerCalls, FollowerLinks, LocalListener, LocalStream
from slurm_rlhf.ranks.worker import RankInfo, Worker
from slurm_rlhf.records import MemoryPart, SyncConnection, SyncReport, Trajectory
from slurm_rlhf.wire import timeouts
from slurm_rlhf.wire.calls import (
    EngineCalls,
    GenerateAnswer,
    GenerateBatch,
    Sampled,
    StartAnswer,
    SyncGroupRequest,
    WakeUpRequest,
)
from slurm_rlhf.wire.client import ControlClient
from slurm_rlhf.wire.messages import FAILURE, Request, sendable

if TYPE_CHECKING:
    from torch import Tensor
    from torch import distributed as dist

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
        self._pending = PendingResponses()
        self._open: dict[tuple[int, int], tuple[int, int]] = {}  # (prompt, sample) -> stream, position
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
            return StartAnswer()
        self.followers = FollowerLinks(self.place, self._accept_followers(), self.config.timeout, self._broken)
        engine = LeadingEngine(self.config, self.place, self._store, self._identity, self.followers)
        self.engine, self._settle = engine, engine.settle
        return StartAnswer()

    def _accept_followers(self) -> dict[int, LocalStream]:
        try:
            return self._listener.accept_all(self.place.followers, self.config.timeout.connect)
        except CallTimeout as error:
            raise CallTimeout(f"{self.place} is not complete: TP {error} (timeout.connect); see their logs") from None
        finally:
            self._listener.close()

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
        """Take over the weights; where a follower's part broke off, that is the answer."""
        report = self.receive_weights(version)
        if not report.broken:
            report = next((answer for answer in self._settle() if answer.broken), report)
        self._halted = bool(self._open) and bool(report.broken)
        return report

    def attention(self) -> str:
        return self.engine.status.attention if hasattr(self, "engine") else ""

    def drop(self) -> None:
        """Drop what is in flight between two steps."""
        self._drop(RunError(f"{self.place} was told to drop its requests"))

    def sleep(self) -> int:
        """Give up the accelerator, and drop what is in flight: its run is being stopped."""
        self._drop(RunError(f"{self.place} was told to sleep"))
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
        """Queue `sampling.n` responses to each prompt; calls of one stream are answered as `PendingResponses` says."""
        answer: CallAnswer = Future()
        try:
            self._queue(batch, answer)
        except Exception as error:
            self._drop(error)
            if not answer.done():
                answer.set_exception(error)
        return answer

    def _queue(self, batch: GenerateBatch, answer: CallAnswer) -> None:
        asked = len(batch.prompts) * batch.sampling.n
        found = self._pending.open(batch.stream, answer, batch.answer or asked, asked)
        if found is not None:
            self._reply(answer, found)
        for position, prompt, token_ids in batch.prompts:
            for sample in range(batch.sampling.n):
                self._open[prompt, sample] = (batch.stream, position)
                seed = request_seed(batch.run_seed, prompt, sample, batch.version)
                self.engine.add(GenerateRequest(f"{prompt}.{sample}", prompt, sample, token_ids, batch.sampling, seed))

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
        for trajectory in finished:
            stream, position = self._open.pop((trajectory.prompt, trajectory.sample))
            completed = self._pending.finish(stream, Sampled(position, trajectory))
            if completed:
                self._reply(*completed)
        self._drained()

    def _reply(self, answer: CallAnswer, found: list[Sampled]) -> None:
        answer.set_result(GenerateAnswer(found, self.meter.take()))

    def _drained(self) -> None:
        """Answer the calls that waited for the last response, if that was it."""
        if not self._open:
            self.meter.rest()
        while self._after_drain and not self._open:
            super().handle(self._after_drain.pop(0))

    def _drop(self, error: Exception) -> None:
        """Fail all calls and let the engine forget its requests, whose keys the next call may use again."""
        self._pending.fail(error)
        self._open.clear()
        try:
            self.engine.drop()
        except Exception:
            log.exception("%s: its engine could not drop its requests", self.place)
        self._drained()

    def close(self) -> None:
        if self.place.tp > 1:
            self._listener.close()  # again, where the engine was started
        super().close()


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
        self._followers.hold(FollowerCalls.add, request)

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


@dataclass(slots=True)
class _Stream:
    """Keeps the calls of one stream in their order, and what is finished and not yet answered."""

    open: deque[tuple[CallAnswer, int]] = field(default_factory=deque)  # call, responses that it asked for
    finished: list[Sampled] = field(default_factory=list)
    owed: int = 0  # responses that were asked for and that no call has come for yet


class PendingResponses:
    """Answers each call of a stream with as many responses as it asked for, whichever finish first.

    So the caller knows how much an engine has in hand: of a call that were answered with its own responses only, the
    last one would hold back the news that the others' places are free. All responses of a stream are answered when as
    many have finished as its calls asked for. A call may ask for more responses than it is answered with: then calls
    that ask for none come for the rest.
    """

    def __init__(self) -> None:
        self._streams: dict[int, _Stream] = {}

    def open(self, stream: int, answer: CallAnswer, count: int, asked: int | None = None) -> list[Sampled] | None:
        """Let `answer` wait for `count` responses, at least 1; `asked`: how many its call asks for, None: as many.

        Returns what to answer it with, if that has finished already. Raises RunError for a call that comes for
        responses which nobody has asked for, or which a failure has taken away.
        """
        queue = self._streams.get(stream, _Stream())
        owed = queue.owed + (count if asked is None else asked) - count
        if owed < 0:
            raise RunError(f"a call came for {count} responses of stream {stream}, and {queue.owed} are left for it")
        self._streams[stream] = queue
        queue.owed = owed
        queue.open.append((answer, count))
        return self._complete(stream)

    def finish(self, stream: int, response: Sampled) -> tuple[CallAnswer, list[Sampled]] | None:
        """Add a finished response; return the call that it completes, if any, and what to answer it with."""
        queue = self._streams[stream]
        queue.finished.append(response)
        first = queue.open[0][0] if queue.open else None
        found = self._complete(stream)
        return None if first is None or found is None else (first, found)

    def _complete(self, stream: int) -> list[Sampled] | None:
        """Take the answer to the first call of the stream, if as many responses have finished."""
        queue = self._streams[stream]
        if not queue.open or len(queue.finished) < queue.open[0][1]:
            return None
        _, count = queue.open.popleft()
        found, queue.finished = queue.finished[:count], queue.finished[count:]
        if not queue.open and not queue.owed:
            del self._streams[stream]
        return found

    def fail(self, error: Exception) -> None:
        """Let all calls fail: nothing that they asked for will come."""
        for queue in self._streams.values():
            for answer, _ in queue.open:
                answer.set_exception(error)
        self._streams.clear()
