"""The rank of an engine that the conductor talks to: one vLLM engine, fed as a stream."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import Any

from slurm_rlhf.config.schema import Config
from slurm_rlhf.control.client import ControlClient
from slurm_rlhf.control.events import FAILURE
from slurm_rlhf.control.local_stream import LocalListener, LocalStream, accept_all
from slurm_rlhf.control.request import Request
from slurm_rlhf.errors import CallTimeout, RunError
from slurm_rlhf.records import Sampling
from slurm_rlhf.rollout.engine import Meter
from slurm_rlhf.rollout.request import GenerateRequest, request_seed
from slurm_rlhf.rollout.tp_group import engine_store
from slurm_rlhf.workers.engine_follower import FollowerRole
from slurm_rlhf.workers.engine_worker import EngineRank, publish_meeting
from slurm_rlhf.workers.follower_links import Followers
from slurm_rlhf.workers.pending_responses import Tickets
from slurm_rlhf.workers.worker import Role, Seat

_LAST_WORDS_S = 1.0  # for the main thread and the control plane to say why


def engine_role(config: Config, seat: Seat, client: ControlClient) -> Role:
    """The leader of an engine, or one of its followers."""
    follows = seat.rank % config.vllm.tensor_parallel_size
    return (FollowerRole if follows else RolloutRole)(config, seat, client)


class RolloutRole(EngineRank):
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

    def calls(self) -> dict[str, Callable[..., Any]]:
        return {
            "start": self.start,
            "sync_join": self.sync_join,
            "sync_receive": self.sync_receive,
            "sleep": self.sleep,
            "wake_up": self.wake_up,
        }

    def start(self, total_steps: int) -> None:
        """Start the engine. `total_steps` is of no use to it."""
        from slurm_rlhf.rollout.tp_engine import LeadingEngine
        from slurm_rlhf.rollout.vllm_engine import VllmEngine

        if self.place.tp == 1:
            self.engine = VllmEngine(self.config, self.place.engine)
            return
        self.followers = Followers(self.place, self._meet(), self._broken)
        self.followers.send([["start", {}]])
        self.engine = LeadingEngine(self.config, self.place, self._store, self._identity, self.followers)

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

    def sync_join(self, parameters: list[list[Any]], **group: Any) -> dict[str, Any]:
        """As `EngineRank.sync_join`, with the followers: `rank` is the leader's, theirs come after it."""
        if self.followers is None:
            return super().sync_join(parameters, **group)
        self.followers.send([["sync_join", {"parameters": parameters, **group}]])
        answer = super().sync_join(parameters, **group)
        self.followers.finish(self.config.timeout.sync)
        return answer

    def sync_receive(self, version: int) -> dict[str, Any]:
        """As `EngineRank.sync_receive`; where a follower's part broke off, that is the answer."""
        answer = super().sync_receive(version)
        if self.followers is not None and "broken" not in answer:
            theirs: list[dict[str, Any]] = self.engine.settle()
            answer = next((word for word in theirs if "broken" in word), answer)
        self._halted = bool(self._open) and "broken" in answer
        return answer

    def attention(self) -> str:
        """See `Role.attention`."""
        return self.engine.attention if hasattr(self, "engine") else ""

    def sleep(self) -> int:
        """Let others have the accelerator: as `Sleeper.sleep`. What is in flight is of a run that is being stopped."""
        self._drop(RunError(f"{self.place} was told to sleep"))
        freed: int = self.engine.sleep()
        return freed

    def wake_up(self, part: str) -> None:
        """As `Sleeper.wake_up`."""
        self.engine.wake_up(part)

    def handle(self, request: Request) -> None:
        """`generate` is answered when as many responses are finished as it asks for; everything else at once.

        New weights wait for the responses in flight, unless vllm.sync_mode lets them change under those.
        """
        if request.method == "sync_receive" and self._open and self.config.vllm.sync_mode == "drain":
            self._after_drain.append(request)
            return
        if request.method != "generate":
            super().handle(request)
            return
        try:
            self._generate(request, **request.args)
        except Exception as error:
            if self._open:
                self.engine.drop()  # what it took of the call so far would be answered to nobody
            self._drop(error)
            if not request.answered:
                request.fail(error)

    def _generate(
        self,
        request: Request,
        prompts: list[list[Any]],
        sampling: dict[str, Any],
        run_seed: int,
        version: int,
        stream: int,
        answer: int = 0,
    ) -> None:
        """Queue `sampling.n` responses to each of `prompts` [[position, prompt, token ids], ...].

        Calls of one `stream` are answered as `Tickets` says, with {"found": [[position, trajectory], ...], "load"}:
        with `answer` responses, 0: with as many as they ask for.
        """
        how = Sampling(**sampling)
        asked = len(prompts) * how.n
        found = self._tickets.open(stream, request, answer or asked, asked)
        if found is not None:
            self._reply(request, found)
        for position, prompt, token_ids in prompts:
            for sample in range(how.n):
                self._open[prompt, sample] = (stream, position)
                seed = request_seed(run_seed, prompt, sample, version)
                self.engine.add(GenerateRequest(f"{prompt}.{sample}", prompt, sample, token_ids, how, seed))

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
            completed = self._tickets.finish(stream, [position, trajectory.to_wire()])
            if completed:
                self._reply(*completed)
        self._drained()

    def _reply(self, request: Request, found: list[Any]) -> None:
        request.reply({"found": found, "load": self.meter.take().to_wire()})

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
