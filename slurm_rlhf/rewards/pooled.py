"""Compute rewards by the user's function, here in workers: a call for the responses to each prompt, whatever happens.

Responses whose call fails are asked again, each alone: so the one that is to blame is known, and the others get their
rewards. A call of several has half of timeout.reward and one alone the other half, so nobody waits for longer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import Any

import numpy as np

from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import RewardError, WorkerError, cut
from slurm_rlhf.records import Prompt, Trajectory
from slurm_rlhf.rewards.items import Item, by_prompt, items_of
from slurm_rlhf.rewards.scored import Rewards, joined, parse_answer
from slurm_rlhf.workers.pool import GONE, RAISED, Code, WorkerNodes, WorkerPool

FAIL, SKIP = "fail", "skip"
LONGEST = 300
"""Characters of the reason that the report shows of a reward that failed."""


class CalledRewards(ABC):
    """Asks for the rewards of the responses to each prompt, and says by `reward.on_error` what those that fail get."""

    streams = True
    """The responses to a prompt may be scored while others are sampled."""
    where = ""
    """Names what is called, where an error does not; empty: each does."""

    def __init__(self, config: Config, printed: Path | None, limit_s: float) -> None:
        """`printed`: the log of those that fail; None: there is none. `limit_s`: what a reward may take."""
        self._on_error, self._input_key = config.reward.on_error, config.data.input_key
        self._printed, self._timeout_s = printed, limit_s

    @abstractmethod
    def _begin(self, items: Sequence[Item], step: int, timeout_s: float) -> Future[Any]:
        """Begin a call for `items`, which has that long. The future may raise WorkerError, and RewardError at once."""

    @abstractmethod
    def _parsed(self, answer: Any, count: int) -> Rewards:
        """Read the answer of a call for `count` responses. Raises RewardError."""

    def __call__(self, prompts: list[Prompt], trajectories: list[Trajectory], step: int = 0) -> Rewards:
        """Compute the rewards of `trajectories`, [N]; blocks. Raises RewardError, as `reward.on_error` says."""
        items = items_of(prompts, trajectories, self._input_key)
        groups = [[items[place] for place in places] for places in by_prompt(prompts)]
        asked = [(group, self._ask(group, step, len(group) > 1)) for group in groups]
        if not asked:
            return Rewards(np.zeros(0, dtype=np.float32))
        return joined([part for group, call in asked for part in self._taken(group, call, step)])

    def _ask(self, items: Sequence[Item], step: int, half: bool) -> Future[Any]:
        return self._begin(items, step, self._timeout_s / (2 if half else 1))

    def _taken(self, items: list[Item], call: Future[Any], step: int) -> list[Rewards]:
        """Return the rewards of `items`, in one part or in one for each."""
        try:
            return [self._read(call, len(items))]
        except WorkerError as error:
            if len(items) == 1 and error.kind != GONE:  # no fault of theirs: their node is lost
                return [self._failed(items[0], error)]
            whole: WorkerError = error
        alone = [(item, self._ask([item], step, True)) for item in items]
        parts = [part for item, call in alone for part in self._taken([item], call, step)]
        if whole.kind == RAISED and not any(part.failed is not None for part in parts):
            raise RewardError(f"{whole}, for {len(items)} responses to a prompt, and for none of them alone")
        return parts

    def _read(self, call: Future[Any], count: int) -> Rewards:
        try:
            answer = call.result()
        except CancelledError:
            raise RewardError("the workers of the reward function were ended") from None
        try:
            return self._parsed(answer, count)
        except RewardError as error:
            raise WorkerError(RAISED, str(error)) from error

    def _failed(self, item: Item, error: WorkerError) -> Rewards:
        said = f"{error}" if error.kind == RAISED or not self.where else f"{self.where}: {error}"
        if self._printed is not None:
            with self._printed.open("a", encoding="utf-8", errors="replace") as log:
                log.write(f"{error.kind}: {said}\n  prompt: {item['prompt']!r}\n  response: {item['response']!r}\n")
        if self._on_error == FAIL:
            where = f" (traceback and what it printed: {self._printed})" if self._printed else ""
            hint = "" if error.kind == RAISED else "; reward.on_error says what such a response gets"
            shown = f"the prompt {cut(item['prompt'], 200)!r} and the response {cut(item['response'], 200)!r}"
            raise RewardError(f"{said}, for {shown}{hint}{where}")
        value = 0.0 if isinstance(self._on_error, str) else self._on_error
        return Rewards(
            np.array([value], dtype=np.float32),
            skipped=np.array([self._on_error == SKIP]),
            failed=np.array([f"{error.kind}: {cut(said, LONGEST)}"]),
        )


class PooledRewards(CalledRewards):
    """Calls the object of `code` in workers; it has `answer(items, step)` and `about()`, as `RewardFunction`."""

    def __init__(self, code: Code, config: Config, printed: Path | None = None, nodes: WorkerNodes = ()) -> None:
        """Start the workers, and wait until they have loaded the code. `printed`: the log; None: the terminal.

        `nodes`: where they run; empty: here.
        Raises RewardError for code that cannot be loaded.
        """
        super().__init__(config, printed, config.timeout.reward)
        reward, start_s = config.reward, config.timeout.connect
        self._pool = WorkerPool(code, max(reward.workers, 1), reward.memory_mb, start_s, printed, nodes)
        try:
            self._pool.ready()
            self.where, self._none = self._pool.submit("about", timeout_s=self._timeout_s).result()
        except WorkerError as error:
            self.close()
            raise RewardError(str(error)) from error

    def close(self) -> None:
        """End the workers."""
        self._pool.close()

    def _begin(self, items: Sequence[Item], step: int, timeout_s: float) -> Future[Any]:
        return self._pool.submit("answer", items, step, timeout_s=timeout_s)

    def _parsed(self, answer: Any, count: int) -> Rewards:
        return parse_answer(answer, count, self.where, self._none)
