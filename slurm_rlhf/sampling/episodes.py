"""Runs episodes, each as one coroutine of a loop in a thread of its own.

User code never runs on the loop. A stop is an exception that may be raised at any point of the main thread. So the main
thread and the loop exchange through `SimpleQueue` and `call_soon_threadsafe` only, which have no lock that it could
leave locked; and the loop is not on the main thread, where a callback could swallow the stop.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Protocol, TypeVar

from slurm_rlhf.cluster.stop import StopRequested
from slurm_rlhf.errors import RoleDied
from slurm_rlhf.records import EngineLoad, Prompt, Sampling, Trajectory
from slurm_rlhf.sampling.batches import GroupState, PromptGroup, responses_of
from slurm_rlhf.sampling.environment import Environments, Episode
from slurm_rlhf.sampling.scheduler import Scheduler

LATE_S = 0.2
"""Seconds between two checks for engines that start late."""

T = TypeVar("T")
Loads = dict[int, EngineLoad]
"""Engine -> its work."""


class GroupSource(Protocol):
    """Begins groups. Its methods are called on the loop."""

    def advance(self) -> None:
        """Do what has become possible: begin groups, hand out those that are complete."""

    def failed(self, error: BaseException) -> None:
        """Wake whoever waits: nothing will come any more."""


class Episodes:
    """Samples groups with the engines of `scheduler`: all episodes of a run, of training and of evaluation."""

    def __init__(
        self,
        scheduler: Scheduler,
        admit: Callable[[int], Any] | None = None,
        environments: Environments | None = None,
    ) -> None:
        """`admit` gives engines that start late, or again, the weights of a policy version; None: no engine does.

        `environments`: what answers the policy between its turns; None: each episode is a prompt and a response.
        """
        self.scheduler = scheduler
        self._play: Callable[[Prompt, Sampling, int], Episode] = Episode if environments is None else environments.begin
        self._admit = admit
        self._sources: list[GroupSource] = []
        self._failure: BaseException | None = None
        self._advancing = False  # `_advance` is scheduled
        self._loop = asyncio.new_event_loop()
        scheduler.post = self.post
        self._thread = threading.Thread(target=self._work, name="episodes", daemon=True)
        self._thread.start()

    # Called from the main thread, or from one that evaluates.

    def sample(
        self, prompts: Sequence[Prompt], sampling: Sampling, version: int, admits: bool = True
    ) -> list[Trajectory]:
        """Sample `sampling.n` responses to each prompt, ordered by (position in `prompts`, sample).

        Their seeds depend on the policy `version`. Blocks; a stop may interrupt it, and drops everything. Calls have
        the deadline timeout.generate. Without `admits` no engine that starts late takes part.
        """
        state = GroupState(version)
        groups = [PromptGroup(place, prompt, state, sampling, version) for place, prompt in enumerate(prompts)]
        self.finish(groups, admits)
        return responses_of(groups)

    def finish(self, groups: Sequence[PromptGroup], admits: bool = True) -> Loads:
        """Sample all responses of groups under one policy version, as `sample` does; return the engines' work."""
        done: SimpleQueue[Loads | BaseException] = SimpleQueue()
        if not groups:
            return {}
        self.post(self.attach, _Listed(self, groups, done))
        return self.wait(done, groups[0].state.version, admits)

    def wait(self, found: SimpleQueue[T | BaseException], version: int, admits: bool = True) -> T:
        """Wait for what the loop puts into `found`, and admit engines meanwhile. Raises it if it is an exception."""
        try:
            while True:
                with suppress(Empty):
                    answer = found.get(timeout=LATE_S)
                    break
                if admits and self._admit is not None:
                    if self._admit(version):
                        self.post(self.scheduler.flush)
                elif not self.scheduler.ready:
                    raise RoleDied("no engine is left, and none gets weights while the actor trains (eval.overlap)")
        except StopRequested:
            self.scheduler.stop()
            raise
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def close(self) -> None:
        """Begin nothing more; episodes in flight are dropped with the engines."""
        with suppress(RuntimeError):  # it is closed
            self._loop.call_soon_threadsafe(self._loop.stop)

    # Called from any thread.

    def post(self, task: Callable[..., object], *arguments: Any) -> None:
        """Have the loop run a task, and then let every source advance."""
        here = threading.get_ident() == self._thread.ident
        with suppress(RuntimeError):  # it is closed
            (self._loop.call_soon if here else self._loop.call_soon_threadsafe)(self._do, task, *arguments)

    # Called on the event loop.

    def attach(self, source: GroupSource) -> None:
        """Let a source begin groups, unless it may already."""
        if source not in self._sources:
            self._sources.append(source)

    def detach(self, source: GroupSource) -> None:
        """Let a source begin no more groups."""
        self._sources.remove(source)

    def begin(self, group: PromptGroup, ended: Callable[[PromptGroup], None]) -> list[asyncio.Task[None]]:
        """Begin the episodes of a group that the scheduler has placed; `ended` gets it when it is complete."""
        group.begun = time.monotonic()
        return [self._loop.create_task(self._episode(group, sample, ended)) for sample in range(group.sampling.n)]

    def fail(self, error: BaseException) -> None:
        """End all sampling."""
        self._failure = self._failure or error
        self._advance_soon()

    async def _episode(self, group: PromptGroup, sample: int, ended: Callable[[PromptGroup], None]) -> None:
        try:
            episode = self._play(group.prompt, group.sampling, sample)
            try:
                whole, turn = await episode.start(), 0
                if whole is not None:
                    self.scheduler.never_asks(group)
                while whole is None:
                    asking = self.scheduler.ask(group, sample, turn, episode.token_ids, episode.limit)
                    whole, turn = await episode.take(await asking), turn + 1
            finally:
                episode.drop()
            group.trajectories.append(whole)
            self.scheduler.ended()
            if len(group.trajectories) == group.sampling.n:
                group.ended = time.monotonic()
                ended(group)
                self._advance_soon()
        except Exception as error:
            self.fail(error)

    def _do(self, task: Callable[..., object], *arguments: Any) -> None:
        try:
            task(*arguments)
        except BaseException as error:
            self._failure = self._failure or error
        self._advance_soon()

    def _advance_soon(self) -> None:
        if not self._advancing:
            self._advancing = True
            self._loop.call_soon(self._advance)

    def _advance(self) -> None:
        self._advancing = False
        for source in list(self._sources):
            try:
                if self._failure is None:
                    source.advance()
            except BaseException as error:
                self._failure = error
        if self._failure is not None:
            for source in self._sources:
                source.failed(self._failure)

    def _work(self) -> None:
        self._loop.set_exception_handler(lambda loop, context: None)  # ignore errors of episodes that are dropped
        self._loop.run_forever()
        self._loop.close()


class _Listed:
    """Implements `GroupSource` with a list of groups that somebody waits for."""

    def __init__(
        self, episodes: Episodes, groups: Sequence[PromptGroup], done: SimpleQueue[Loads | BaseException]
    ) -> None:
        self._episodes, self._done = episodes, done
        self._left, self._unfinished = deque(groups), len(groups)
        self._before = episodes.scheduler.loads  # work counted for a source that is paused
        episodes.scheduler.loads = {}

    def advance(self) -> None:
        while self._left and self._episodes.scheduler.place(self._left[0], len(self._left) * self._left[0].sampling.n):
            self._episodes.begin(self._left.popleft(), self._ended)
        if not self._unfinished:
            self._episodes.detach(self)
            scheduler = self._episodes.scheduler
            self._done.put(scheduler.take_loads())
            scheduler.loads = self._before

    def failed(self, error: BaseException) -> None:
        self._done.put(error)

    def _ended(self, group: PromptGroup) -> None:
        self._unfinished -= 1
