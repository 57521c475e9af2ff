"""The rank of an engine that the conductor talks to: one vLLM engine, fed as a stream."""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any

from slurm_rlhf.config.schema import Config
from slurm_rlhf.control.calls import (
    EngineCalls,
    GenerateAnswer,
    GenerateBatch,
    Sampled,
    StartAnswer,
    StartRequest,
    SyncConnection,
    SyncGroupRequest,
    SyncReport,
    SyncUpdateRequest,
    WakeUpRequest,
)
from slurm_rlhf.control.client import ControlClient
from slurm_rlhf.control.messages import FAILURE, Request
from slurm_rlhf.errors import CallTimeout, RunError
from slurm_rlhf.rollout.engine import Meter
from slurm_rlhf.rollout.request import GenerateRequest, request_seed
from slurm_rlhf.rollout.tp_group import engine_store
from slurm_rlhf.workers.engine_follower import FollowerRole
from slurm_rlhf.workers.engine_worker import EngineRank, publish_meeting
from slurm_rlhf.workers.follower_links import Followers
from slurm_rlhf.workers.local_stream import LocalListener, LocalStream, accept_all
from slurm_rlhf.workers.pending_responses import Tickets
from slurm_rlhf.workers.worker import Role, Seat

_RECEIVE = EngineCalls.sync_receive.__name__
_LAST_WORDS_S = 1.0  # for the main thread and the control plane to say why


def engine_role(config: Config, seat: Seat, client: ControlClient) -> Role:
    """The leader of an engine, or one of its followers."""
    follows = seat.rank % config.vllm.tensor_parallel_size
    return (FollowerRole if follows else RolloutRole)(config, seat, client)


class RolloutRole(EngineRank, EngineCalls):
    """Owns the engine's step loop: calls are looked at between two steps, never during one."""

    def __init__(self, config: Config, seat: Seat, client: ControlClient) -> None:
        super().__init__(config, seat, client)
        self.meter = Meter()
        self._tickets = Tickets()
        self._open: dict[tuple[int, int], tuple[int, int]] = {}  # (prompt, sample) -> its stream, its position there
        self._after_drain: list[Request] = []
        self._halted = False  # by an update that broke off under responses in flight: they wait for the next one
        self.followers: Followers | None = None
        if self.place.tp > 1:
            self._store = engine_store(self.place, config.timeout.connect)
            self._listener = LocalListener(self.place.tp)
            self._identity = publish_meeting(self._store, config, self.place, self._listener.path)

    def start(self, request: StartRequest) -> StartAnswer:
        from slurm_rlhf.rollout.tp_engine import LeadingEngine
        from slurm_rlhf.rollout.vllm_engine import VllmEngine

        if self.place.tp == 1:
            self.engine = VllmEngine(self.config, self.place.engine)
            return StartAnswer()
        self.followers = Followers(self.place, self._meet(), self._broken)
        self.followers.send([["start", {}]])
        self.engine = LeadingEngine(self.config, self.place, self._store, self._identity, self.followers)
        return StartAnswer()

    def _meet(self) -> dict[int, LocalStream]:
        try:
            return accept_all(self._listener, self.place.followers, self.config.timeout.connect)
        except CallTimeout as error:
            raise CallTimeout(f"{self.place} is not complete: TP {error} (timeout.connect); see their logs") from None
        finally:
            self._listener.close()

    def _broken(self, reason: str) -> None:
        """The main thread may be inside a collective that never ends, so this process is given up from here."""
        print(reason, file=sys.stderr, flush=True)
        self.client.event(FAILURE, reason=reason)
        timer = threading.Timer(_LAST_WORDS_S, os._exit, (1,))
        timer.daemon = True
        timer.start()

    def sync_join(self, request: SyncGroupRequest) -> SyncConnection:
        """Join together with the followers: `request.rank` is the leader's, theirs come after it."""
        if self.followers is None:
            return self.join_group(request)
        self.followers.send([["sync_join", asdict(request)]])
        answer = self.join_group(request)
        self.followers.finish(self.config.timeout.sync)
        return answer

    def sync_receive(self, request: SyncUpdateRequest) -> SyncReport:
        """Take over the weights; where a follower's part broke off, that is the answer."""
        report = self.receive_weights(request.version)
        if self.followers is not None and not report.broken:
            theirs: list[dict[str, Any]] = self.engine.settle()
            report = next((SyncReport(broken=word["broken"]) for word in theirs if "broken" in word), report)
        self._halted = bool(self._open) and bool(report.broken)
        return report

    def attention(self) -> str:
        """See `Role.attention`."""
        return self.engine.attention if hasattr(self, "engine") else ""

    def sleep(self) -> int:
        """Let others have the accelerator: as `Sleeper.sleep`. What is in flight is of a run that is being stopped."""
        self._drop(RunError(f"{self.place} was told to sleep"))
        freed: int = self.engine.sleep()
        return freed

    def wake_up(self, request: WakeUpRequest) -> None:
        self.engine.wake_up(request.part)

    def handle(self, request: Request) -> None:
        """Answer a call; new weights wait for the responses in flight, unless vllm.sync_mode is inflight."""
        if request.method == _RECEIVE and self._open and self.config.vllm.sync_mode == "drain":
            self._after_drain.append(request)
            return
        super().handle(request)

    def generate(self, batch: GenerateBatch) -> Future[GenerateAnswer]:
        """Queue `sampling.n` responses to each prompt; calls of one stream are answered as `Tickets` says."""
        answer: Future[GenerateAnswer] = Future()
        try:
            self._queue(batch, answer)
        except Exception as error:
            if self._open:
                self.engine.drop()  # what it took of the call so far would be answered to nobody
            self._drop(error)
            if not answer.done():
                answer.set_exception(error)
        return answer

    def _queue(self, batch: GenerateBatch, answer: Future[GenerateAnswer]) -> None:
        asked = len(batch.prompts) * batch.sampling.n
        found = self._tickets.open(batch.stream, answer, batch.answer or asked, asked)
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
        """One engine step; answers the calls that it completed."""
        if not self.busy():
            return
        self.meter.begin()
        try:
            landed = self.engine.step()
        except Exception as error:
            self._drop(error)
            return
        self.meter.stepped(self.engine.gauges, len(landed))
        for trajectory in landed:
            stream, position = self._open.pop((trajectory.prompt, trajectory.sample))
            completed = self._tickets.finish(stream, Sampled(position, trajectory))
            if completed:
                self._reply(*completed)
        self._drained()

    def _reply(self, answer: Future[GenerateAnswer], found: list[Sampled]) -> None:
        answer.set_result(GenerateAnswer(found, self.meter.take()))

    def _drained(self) -> None:
        """No requests are left, perhaps: then do what waited for that."""
        if not self._open:
            self.meter.rest()
        while self._after_drain and not self._open:
            super().handle(self._after_drain.pop(0))

    def _drop(self, error: Exception) -> None:
        """The engine has dropped all of its requests."""
        self._tickets.fail(error)
        self._open.clear()
        self._drained()

    def close(self) -> None:
        if self.place.tp > 1:
            self._listener.close()  # again, where the engine was started
        super().close()
