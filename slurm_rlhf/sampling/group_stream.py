"""Makes the batches of a run from a stream of groups, which begin one after the other, or in rounds.

The pure functions of `batches` decide which groups begin, and which are in a batch.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue

from slurm_rlhf.algorithms.reward_shaping import refill
from slurm_rlhf.config.roles import has_engines
from slurm_rlhf.config.schema import Config
from slurm_rlhf.data.order import PromptOrder
from slurm_rlhf.data.prompts import PromptSet
from slurm_rlhf.polling import in_thread
from slurm_rlhf.rewards.scored import Rewards, Scoring
from slurm_rlhf.sampling.batches import (
    Batch,
    EpisodesOver,
    FilterCounts,
    GroupState,
    PromptGroup,
    assemble_batch,
    choose,
    first_passing,
    on_policy_room,
    owners_of,
    responses_of,
    room,
    sampling_of,
)
from slurm_rlhf.sampling.episodes import Episodes


@dataclass(eq=False)
class GroupStream:
    """Gives each step its batch: of groups of any age within the bound, or of fresh ones, if `size` is None.

    With groups of any age, those that are in flight or left over stay for the next batch. With fresh ones nothing
    begins unless a step waits, and a batch has the first passing groups in the order of the prompts. Further groups
    would be stale in the next step, so they are forgotten and their prompts come first there: the prompts of a step do
    not depend on time, and the checkpoint is one number.

    With rounds (no filter, train.full_determinism, rollout.engine = hf) the size of a round, and which engine gets
    which prompt, depend on the groups that passed before and never on time, so the metrics are equal bit for bit. The
    price: engines wait for the last response of a round.
    """

    config: Config
    prompts: PromptSet
    order: PromptOrder
    last: int  # last step of the run
    episodes: Episodes
    reward: Scoring
    awake: Callable[[int], AbstractContextManager[None]]
    """Prepares the engines to sample with a policy version: colocated ones are awake inside it."""

    def __post_init__(self) -> None:
        config, train, algo = self.config, self.config.train, self.config.algo
        filtered, inflight = algo.dynamic_filtering_enable, config.vllm.sync_mode == "inflight"
        # train.async_queue_size; None: a step samples its batch, under one policy
        self.size = train.async_queue_size if inflight else None
        # True: groups begin together, when all earlier ones are judged
        self.rounds = not inflight and not (filtered and has_engines(config) and not train.full_determinism)
        # counts of dynamic sampling; None: every group is trained on
        self.counts = FilterCounts(algo.dynamic_filtering_range) if filtered else None
        self._batch = self._at_once = config.rollout.batch_size  # groups of a step; groups in flight for one
        if filtered:
            self._at_once = config.rollout.vllm_generate_batch_size or self._batch
        self._most = algo.dynamic_filtering_max_tries * self._at_once  # groups sampled for a batch that is filtered
        self._ahead = int(train.staleness_threshold * self._batch)  # groups of a batch that older policies may begin
        self._sampling = sampling_of(config)
        self._groups: list[PromptGroup] = []  # groups begun since the last batch, in order
        self._coming: deque[PromptGroup] = deque()  # groups that begin next
        self._open: dict[PromptGroup, list[asyncio.Task[None]]] = {}  # episodes in flight
        self._unscored: list[PromptGroup] = []  # finished since `advance`, for rewards that stream
        self._finished: list[PromptGroup] = []  # finished, but not judged
        self._judging: list[PromptGroup] = []
        self._next: list[PromptGroup] | None = None  # the batch that could be taken now
        self._changed = True  # groups have changed since `_next` was chosen
        self._version = 0  # oldest policy version in the engines
        self._step = 0  # next step to be trained; 0: none has asked yet
        self._wanted = False  # True: the step waits for its batch
        self._paused = False
        self._quiet_noted = False  # True: the main thread knows that no group is in flight
        self._failure: BaseException | None = None  # why there is no further batch
        self._ready: SimpleQueue[Batch | BaseException] = SimpleQueue()
        self._quiet: SimpleQueue[BaseException | None] = SimpleQueue()

    def take(self, step: int) -> Batch:
        """Wait for the batch of `step`; the engines' calls have the time-outs.

        Raises what sampling raised, FilteredAway, and EpisodesOver where prompts run out before it is full.
        """
        with self.awake(step - 1):
            self.episodes.post(self._want, step)
            return self.episodes.wait(self._ready, step - 1)

    def updated(self, version: int) -> None:
        """Note that all engines have policy `version`; return at once."""
        self.episodes.post(self._update, version)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Begin no groups meanwhile, so that the engines can do other work."""
        self.episodes.post(self._pause, True)
        try:
            self.episodes.wait(self._quiet, self._version)
            yield
        finally:
            self.episodes.post(self._pause, False)

    def close(self) -> None:
        """Begin no further group. Groups in flight are dropped with the engines; they can be sampled again."""
        self.episodes.close()

    # Called on the event loop.

    def _want(self, step: int) -> None:
        self.episodes.attach(self)
        self._step, self._version, self._wanted, self._changed = step, max(self._version, step - 1), True, True

    def _update(self, version: int) -> None:
        self._version = version

    def _pause(self, paused: bool) -> None:
        self.episodes.attach(self)
        self._paused, self._quiet_noted = paused, False

    def failed(self, error: BaseException) -> None:
        self._failure = self._failure or error
        if self._wanted:
            self._wanted = False
            self._ready.put(self._failure)
        self._tell_quiet()

    def advance(self) -> None:
        if self._failure is not None:
            self.failed(self._failure)
            return
        self._score()
        self._judge()
        if self._wanted and (chosen := self._choose()) is not None:
            self._deliver(chosen)
        while not self._paused and self._admits() and self._begin():
            pass
        if self._wanted and not self._busy() and not self._coming:
            self.failed(self._end())
        if not self._busy():
            self._tell_quiet()

    def _tell_quiet(self) -> None:
        """Wake the main thread if it waits to have the engines to itself."""
        if self._paused and not self._quiet_noted:
            self._quiet_noted = True
            self._quiet.put(None)

    def _busy(self) -> bool:
        return bool(self._open or self._finished or self._judging)

    def _room(self) -> int:
        dropped = sum(group.verdict is False for group in self._groups)
        if self.size is None:
            passed = sum(group.verdict is True for group in self._groups)
            begun = len(self._groups)
            unfinished = begun - passed - dropped
            fresh = on_policy_room(passed, unfinished, begun, self._batch, self._at_once, self._most)
            return fresh if self._wanted else 0
        if (self.counts is not None and dropped >= self._most) or self._choose() is not None:
            return 0  # the next batch is ready: a group that begins now would only be older
        waiting = len(self._groups) - dropped
        return room(waiting, self._version, self._step, self.size, self._batch, self.last, self._ahead)

    def _admits(self) -> bool:
        """Tell whether a group may begin; it is then the first of `_coming`."""
        order = self.order
        if not self._step:
            return False
        if self.rounds:
            if self._wanted and not self._busy() and not self._coming:
                self._coming.extend(self._round())
        elif self._room() <= 0:
            return False
        elif not self._coming and order.left:
            (place,) = order.take(1)
            self._coming.append(self._group(place, place // self._batch))
        return bool(self._coming)

    def _round(self) -> list[PromptGroup]:
        """Make the groups of the next round; fewer at an episode's end: no prompt comes twice."""
        order, judged = self.order, len(self._groups)
        passed = sum(group.verdict is True for group in self._groups)
        count = refill(self._batch - passed, passed, judged, self._at_once) if judged else self._at_once
        places = order.take(min(count, self._most - judged))
        behind = [place for place in places if order.episode_of(place) != order.episode_of(places[0])]
        order.give_back(behind)
        # The number of the first place's batch seeds them, so a prompt that comes again gets other responses.
        return [self._group(place, places[0] // self._batch) for place in places if place not in behind]

    def _group(self, place: int, round: int) -> PromptGroup:
        prompt = self.prompts[self.order.position(place)]
        return PromptGroup(place, prompt, GroupState(self._version), self._sampling, round)

    def _begin(self) -> bool:
        """Begin the next group; return False if no engine has room for it."""
        group, episodes = self._coming[0], self.episodes
        left = len(self._coming) * group.sampling.n if self.rounds else None
        if not episodes.scheduler.place(group, left):
            return False
        self._groups.append(self._coming.popleft())
        group.state.version = self._version
        self._open[group] = episodes.begin(group, self._ended)
        return True

    def _ended(self, group: PromptGroup) -> None:
        del self._open[group]
        if self.counts is None:
            group.verdict = group.state.finished = self._changed = True
            if self.reward.streams:
                self._unscored.append(group)
        else:
            self._finished.append(group)

    def _score(self) -> None:
        """Have groups scored that finished at once: one thread waits for all of them."""
        if groups := self._unscored:
            self._unscored = []
            size = groups[0].sampling.n
            found = self.reward.begin_each(owners_of(groups), responses_of(groups), self._step, size)
            for group, scoring in zip(groups, found, strict=True):
                group.scoring = scoring

    def _judge(self) -> None:
        """Let the reward function judge what has finished since its last call: one call at a time, of whole rounds."""
        if not self._finished or self._judging or (self.rounds and (self._open or self._coming)):
            return
        groups, self._finished = sorted(self._finished, key=lambda group: group.place), []
        self._judging = groups
        call = in_thread(partial(self.reward, owners_of(groups), responses_of(groups), self._step), "reward")
        call.add_done_callback(lambda call: self.episodes.post(self._judged, groups, call))

    def _judged(self, groups: list[PromptGroup], call: Future[Rewards]) -> None:
        self._judging, self._changed = [], True
        if (error := call.exception()) is not None:
            self._failure = error
            return
        assert self.counts is not None
        self.counts.judge(groups, call.result(), groups[0].sampling.n)
        for group in groups:
            group.state.finished = group.verdict is True

    def _choose(self) -> list[PromptGroup] | None:
        """Return the groups of the next batch, if it is complete; chosen anew only after a group was finished."""
        if self._changed:
            self._next, self._changed = self._choose_anew(), False
        return self._next

    def _choose_anew(self) -> list[PromptGroup] | None:
        if self.size is None:
            # Wait for the user's function: otherwise an evaluation might call it at the same time.
            chosen = None if self._judging else first_passing([g.verdict for g in self._groups], self._batch)
            return None if chosen is None else [self._groups[index] for index in chosen]
        alive = [group for group in self._groups if group.verdict is not False]
        chosen = choose([group.state for group in alive], self._step, self.size, self._batch)
        return None if chosen is None else [alive[index] for index in chosen]

    def _deliver(self, chosen: list[PromptGroup]) -> None:
        """Give the batch to the step that waits, and go over to the next step."""
        owed: list[int] = []
        if self.size is None:
            behind = self._groups[self._groups.index(chosen[-1]) + 1 :]
            self.order.give_back(group.place for group in [*self._coming, *behind])
            for task in (task for tasks in self._open.values() for task in tasks):
                task.cancel()
            self._open.clear()
            self._coming.clear()
            self._groups, self._finished = [], []
            self.episodes.scheduler.forget()
        else:
            self._groups = [g for g in self._groups if g.verdict is not False and g not in chosen]
            owed = [group.place for group in [*self._coming, *self._groups]]
        state, loads = self.order.state_dict(owed), self.episodes.scheduler.take_loads()
        self._ready.put(assemble_batch(self._step, chosen, loads, state, self.counts))
        self._step, self._wanted, self._changed = self._step + 1, False, True

    def _end(self) -> BaseException:
        """Return the error for a batch that cannot become full."""
        kept = sum(group.verdict is True for group in self._groups)
        if self.counts is not None and len(self._groups) - kept * (self.size is not None) >= self._most:
            return self.counts.filtered_away(
                self._step, kept, self._batch, self.config.algo.dynamic_filtering_max_tries
            )
        return EpisodesOver(self._step, kept, self._batch)
