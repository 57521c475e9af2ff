"""Samples a stream of groups: prompts go to the engines one after the other, and finished groups become batches.

One thread owns the state of the groups. The main thread, and the answers of engines and of the reward function, put
tasks into its inbox. After each task it does what is possible: it completes the batch that a step waits for, has groups
judged, and begins others. The pure functions of `group_rules` decide which groups begin, and which are in a batch.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from slurm_rlhf.data.order import PromptOrder
from slurm_rlhf.data.prompts import PromptSet
from slurm_rlhf.polling import in_thread
from slurm_rlhf.records import Prompt, Sampling
from slurm_rlhf.rewards.function import Rewards
from slurm_rlhf.rewards.model import Scoring
from slurm_rlhf.sampling.batches import Batch, FilterCounts, PromptGroup, assemble_batch, episodes_over
from slurm_rlhf.sampling.engine_feed import EngineFeed
from slurm_rlhf.sampling.group_rules import GroupState, choose, first_passing, on_policy_room, room
from slurm_rlhf.wire.calls import GenerateAnswer

LATE_S = 0.2
"""Seconds between two looks for engines that start late, while a step waits for its batch."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Limits the number of groups."""

    batch: int  # groups of a step
    last: int  # last step of the run
    size: int | None  # train.async_queue_size; None: a batch is sampled when its step asks, under one policy
    at_once: int = 0  # rollout.vllm_generate_batch_size, for a batch under one policy
    tries: int = 0  # algo.dynamic_filtering_max_tries
    ahead: int = 0  # groups of a batch that may be begun by older policies: train.staleness_threshold of the batch

    @property
    def most(self) -> int:
        """Count the groups that may be sampled for a batch that is filtered."""
        return self.tries * self.at_once


@dataclass(slots=True)
class GroupStream:
    """Implements `Batches` with groups of any age within the bound, or, where `rule.size` is None, with fresh ones.

    The first `take` starts it. With groups of any age, those that are in flight or left over stay for the next batch.
    With fresh ones a batch has the first passing groups in the order of the prompts. Further groups would be stale in
    the next step, so they are forgotten and their prompts come first there: the prompts of a step do not depend on
    time, and the checkpoint is one number.
    """

    rule: Rule
    prompts: PromptSet
    order: PromptOrder
    sampling: Sampling
    feed: EngineFeed
    reward: Scoring | None = None  # judges groups for dynamic sampling; None: every group is trained on
    counts: FilterCounts | None = None
    admit: Callable[[int], Any] | None = None  # admits engines that start late, in the middle of a batch
    rescue: Callable[[], Any] | None = None  # admits an engine if none is left
    _groups: list[PromptGroup] = field(default_factory=list, init=False)  # those since the last batch, in order
    _open: dict[int, PromptGroup] = field(default_factory=dict, init=False)  # place -> group in flight
    _orphans: list[PromptGroup] = field(default_factory=list, init=False)  # groups in flight on a lost engine
    _held_back: list[tuple[int, Prompt]] = field(default_factory=list, init=False)  # the prompt is in flight
    _finished: list[PromptGroup] = field(default_factory=list, init=False)  # finished, but not judged
    _judging: list[PromptGroup] = field(default_factory=list, init=False)
    _next: list[PromptGroup] | None = field(default=None, init=False)  # the batch that could be taken now
    _changed: bool = field(default=True, init=False)  # groups have changed since `_next` was chosen
    _version: int = field(default=0, init=False)  # oldest policy version in the engines
    _step: int = field(default=1, init=False)  # next step to be trained
    _wanted: bool = field(default=False, init=False)  # True: the step waits for its batch
    _paused: bool = field(default=False, init=False)
    _quiet_noted: bool = field(default=False, init=False)  # True: the main thread knows that none is in flight
    _closed: bool = field(default=False, init=False)
    _failure: BaseException | None = field(default=None, init=False)
    # A stop may interrupt the main thread anywhere: these have no lock that it could leave taken.
    _inbox: SimpleQueue[Callable[[], None]] = field(default_factory=SimpleQueue, init=False)
    _ready: SimpleQueue[Batch | BaseException] = field(default_factory=SimpleQueue, init=False)
    _quiet: SimpleQueue[None] = field(default_factory=SimpleQueue, init=False)
    _thread: threading.Thread | None = field(default=None, init=False)

    def take(self, step: int) -> Batch:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="groups", daemon=True)
            self._thread.start()
        self._inbox.put(partial(self._want, step))
        found = self._ready.get()
        if isinstance(found, BaseException):
            raise found
        return found

    def updated(self, version: int) -> None:
        self._inbox.put(partial(self._update, version))

    @contextmanager
    def alone(self) -> Iterator[None]:
        if self._thread is None:
            yield
            return
        self._inbox.put(partial(self._pause, True))
        try:
            self._quiet.get()
            yield
        finally:
            self._inbox.put(partial(self._pause, False))

    def close(self) -> None:
        self._inbox.put(self._close)

    # The tasks, and all that follows, run on the thread.

    def _want(self, step: int) -> None:
        self._step, self._version, self._wanted, self._changed = step, max(self._version, step - 1), True, True

    def _update(self, version: int) -> None:
        self._version = version

    def _pause(self, paused: bool) -> None:
        self._paused, self._quiet_noted = paused, False

    def _close(self) -> None:
        self._closed = True

    def _work(self) -> None:
        while not self._closed:
            looking = self._failure is None and (self._actor_idle if self._without_engines else self._admits)
            try:
                task = self._inbox.get(timeout=LATE_S if looking else None)
            except Empty:
                task = None
            try:
                if task is not None:
                    task()
                if self._failure is None and not self._closed:
                    self._advance()
            except BaseException as error:
                self._failure = error
            self._tell()

    @property
    def _admits(self) -> bool:
        return self._wanted and self.admit is not None

    @property
    def _actor_idle(self) -> bool:
        """Tell whether the main thread waits here, so that the actor has time to give its weights away."""
        return self._wanted or (self._paused and not self._quiet_noted)

    @property
    def _without_engines(self) -> bool:
        """Tell whether no engine is left."""
        return not self.feed.rollout.ready and self.rescue is not None

    def _tell(self) -> None:
        """Wake the main thread after a failure, or when it has the engines to itself."""
        if self._failure is not None and self._wanted:
            self._wanted = False
            self._ready.put(self._failure)
        if self._paused and not self._quiet_noted and (self._failure is not None or not self._busy()):
            self._quiet_noted = True
            self._quiet.put(None)

    def _busy(self) -> bool:
        return bool(self._open or self._finished or self._judging)

    def _advance(self) -> None:
        self._judge()
        if self._wanted and (chosen := self._choose()) is not None:
            self._deliver(chosen)
        if self._wanted and self.admit is not None:
            self.admit(self._version)
        if self._without_engines and self._actor_idle and self.rescue is not None:
            self.rescue()
        while self._orphans and (engine := self.feed.free(self.sampling.n)) is not None:
            self._ask(self._orphans.pop(0), engine)
        while not self._paused and (engine := self.feed.free(self.sampling.n)) is not None:
            if self._room() <= 0 or not self._begin(engine):
                break
        if self._wanted and not self._busy():
            raise self._end()

    def _room(self) -> int:
        rule, filtered = self.rule, self.counts is not None
        dropped = sum(group.verdict is False for group in self._groups)
        if rule.size is None:
            passed = sum(group.verdict is True for group in self._groups)
            begun = len(self._groups)
            unfinished = begun - passed - dropped
            fresh = on_policy_room(passed, unfinished, begun, rule.batch, rule.at_once, rule.most)
            return fresh if self._wanted else 0
        if (filtered and dropped >= rule.most) or self._choose() is not None:
            return 0  # the next batch is ready: a group that begins now would only be older
        waiting = len(self._groups) - dropped
        return room(waiting, self._version, self._step, rule.size, rule.batch, rule.last, rule.ahead)

    def _begin(self, engine: int) -> bool:
        """Begin one group on an engine; return False if all prompts that are left are in flight."""
        if (found := self._next_prompt()) is None:
            return False
        place, prompt = found
        self._groups.append(group := PromptGroup(place, prompt, GroupState(self._version)))
        self._open[place] = group
        self._ask(group, engine)
        return True

    def _ask(self, group: PromptGroup, engine: int) -> None:
        """Ask an engine for the responses of a group; it keeps those that it has."""
        group.engine = engine
        arrived = partial(self._arrived, self.feed.stream)
        self.feed.ask(engine, group.place, group.prompt, self.sampling, group.place // self.rule.batch, arrived)

    def _next_prompt(self) -> tuple[int, Prompt] | None:
        """Take the next prompt that no engine is working on: the rows of small data sets come back soon."""
        working = {group.prompt.index for group in self._open.values()}
        for index, (_, prompt) in enumerate(self._held_back):
            if prompt.index not in working:
                return self._held_back.pop(index)
        while self.order.left and len(self._held_back) < (self.rule.batch if self.rule.size is not None else 1):
            (place,) = self.order.take(1)
            prompt = self.prompts[self.order.position(place)]
            if prompt.index not in working:
                return place, prompt
            self._held_back.append((place, prompt))
        return None

    def _arrived(self, stream: int, engine: int, call: Future[GenerateAnswer]) -> None:
        self._inbox.put(partial(self._answered, stream, engine, call))

    def _answered(self, stream: int, engine: int, call: Future[GenerateAnswer]) -> None:
        if stream != self.feed.stream:  # an answer that was forgotten
            return
        error = call.exception()
        if error is not None and self.feed.rollout.goes_on_without(engine, error):
            self._lose(engine)
            return
        answer = call.result()
        self.feed.took(engine, answer)
        for place, trajectory in answer.found:
            group = self._open.get(place)
            if group is None or trajectory.sample in [known.sample for known in group.trajectories]:
                continue  # a lost engine has sent this response before
            group.trajectories.append(trajectory)
            if len(group.trajectories) == self.sampling.n:
                del self._open[place]
                group.ended = time.monotonic()
                if self.counts is None:
                    group.verdict = group.state.finished = self._changed = True
                else:
                    self._finished.append(group)

    def _lose(self, engine: int) -> None:
        """Keep the groups of a lost engine for others; each of its calls comes here."""
        self.feed.lost(engine)
        found = [group for group in self._open.values() if group.engine == engine and group not in self._orphans]
        self._orphans += found

    def _judge(self) -> None:
        """Let the reward function judge the groups that have finished since its last call: one call at a time."""
        if self.reward is None or not self._finished or self._judging:
            return
        groups, self._finished = self._finished, []
        self._judging = groups
        owners = [group.prompt for group in groups for _ in group.trajectories]
        responses = [t for group in groups for t in sorted(group.trajectories, key=lambda t: t.sample)]
        call = in_thread(partial(self.reward, owners, responses, self._step), "reward")
        call.add_done_callback(lambda call: self._inbox.put(partial(self._judged, groups, call)))

    def _judged(self, groups: list[PromptGroup], call: Future[Rewards]) -> None:
        self._judging, self._changed = [], True
        assert self.counts is not None
        self.counts.judge(groups, call.result(), self.sampling.n)
        for group in groups:
            group.state.finished = group.verdict is True

    def _choose(self) -> list[PromptGroup] | None:
        """Return the groups of the next batch, if it is complete; chosen anew only after a group was finished."""
        if self._changed:
            self._next, self._changed = self._look(), False
        return self._next

    def _look(self) -> list[PromptGroup] | None:
        if self.rule.size is None:
            # Wait for the user's function: otherwise an evaluation might call it at the same time.
            chosen = None if self._judging else first_passing([g.verdict for g in self._groups], self.rule.batch)
            return None if chosen is None else [self._groups[index] for index in chosen]
        alive = [group for group in self._groups if group.verdict is not False]
        chosen = choose([group.state for group in alive], self._step, self.rule.size, self.rule.batch)
        return None if chosen is None else [alive[index] for index in chosen]

    def _deliver(self, chosen: list[PromptGroup]) -> None:
        """Give the batch to the step that waits, and go over to the next step."""
        taken = {group.place for group in chosen}
        held_back = [place for place, _ in self._held_back]
        if self.rule.size is None:
            behind = self._groups[self._groups.index(chosen[-1]) + 1 :]
            self.order.give_back([*held_back, *(group.place for group in behind)])
            self._groups, self._held_back, self._finished, owed = [], [], [], []
            self._open.clear()
            self._orphans.clear()
            self.feed.forget()
        else:
            self._groups = [g for g in self._groups if g.verdict is not False and g.place not in taken]
            owed = [*held_back, *(group.place for group in self._groups)]
        state = self.order.state_dict(owed)
        self._ready.put(assemble_batch(self._step, chosen, self.feed.take_loads(), state, self.counts))
        self._step, self._wanted, self._changed = self._step + 1, False, True

    def _end(self) -> BaseException:
        """Return the error for a batch that cannot become full."""
        rule, kept = self.rule, sum(group.verdict is True for group in self._groups)
        if self.counts is not None and len(self._groups) - kept * (rule.size is not None) >= rule.most:
            return self.counts.filtered_away(self._step, kept, rule.batch, rule.tries)
        return episodes_over(self._step, kept, rule.batch)
