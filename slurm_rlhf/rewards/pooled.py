"""Compute rewards by the user's function, in workers or on servers, with one call for all responses to a prompt.

If a call fails, each of its responses is scored again by a call of its own, which shows the one at fault; the others
get their rewards. Each of the two calls may take half of timeout.reward, so together they keep to it.

`RewardServer` and `ModelServer` are what `slurm-rlhf serve-reward` runs, in the workers of its machine. OpenRLHF: POST
{"query", "prompts", "labels"} -> {"rewards", "scores"?, "extra_logs"?}. Our request has `items`, `step` and
`timeout_s`, too, which other servers ignore; an answer may have `components`, and null where a reward does not apply.
The server makes the items of a request without `items` from its three fields.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np

from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import RewardError, WorkerError, cut
from slurm_rlhf.records import Prompt, Trajectory
from slurm_rlhf.rewards.items import Item, answered, by_prompt, items_of
from slurm_rlhf.rewards.scored import KEYS, Rewards, joined, parse_answer
from slurm_rlhf.workers.http import UNANSWERED, Servers, WorkServer, token_of
from slurm_rlhf.workers.pool import ENDED, GONE, LATE, MEMORY, RAISED, Code, WorkerNodes, WorkerPool, of_load

FAIL, SKIP = "fail", "skip"
LONGEST = 300
"""Most characters of a failed reward's reason that the report shows."""


class CalledRewards(ABC):
    """Requests the rewards of the responses to each prompt; `reward.on_error` decides the rewards of failed calls."""

    streams = True
    """True: the responses to a prompt may be scored while others are sampled."""
    where = ""
    """Name of the called function, for errors without it; empty: all errors have a name."""

    def __init__(self, config: Config, printed: Path | None, limit_s: float) -> None:
        """`printed`: the log of rewards that fail; None: no log. `limit_s`: seconds that a reward may take."""
        self._on_error, self._input_key = config.reward.on_error, config.data.input_key
        self._printed, self._timeout_s = printed, limit_s

    @abstractmethod
    def _begin(self, items: Sequence[Item], step: int, timeout_s: float) -> Future[Any]:
        """Begin a call for `items`. A WorkerError of its future is handled, a RewardError is not."""

    @abstractmethod
    def _parsed(self, answer: Any, count: int) -> Rewards:
        """Read the answer of a call for `count` responses. Raises RewardError."""

    def __call__(self, prompts: list[Prompt], trajectories: list[Trajectory], step: int = 0) -> Rewards:
        """Compute the rewards of `trajectories`, [N]; blocks. Raises RewardError, as `reward.on_error` says."""
        items = items_of(prompts, trajectories, self._input_key)
        groups = [[items[place] for place in places] for places in by_prompt(prompts)]
        asked = {self._ask(group, step, len(group) > 1): group for group in groups}
        if not asked:
            return Rewards(np.zeros(0, dtype=np.float32))
        done: SimpleQueue[Future[Any]] = SimpleQueue()
        for call in asked:
            call.add_done_callback(done.put)
        ended = (done.get() for _ in asked)
        taken = {call: self._taken(asked[call], call, step) for call in ended}
        return joined([part for call in asked for part in taken[call]()])

    def _ask(self, items: Sequence[Item], step: int, half: bool) -> Future[Any]:
        return self._begin(items, step, self._timeout_s / (2 if half else 1))

    def _taken(self, items: list[Item], call: Future[Any], step: int) -> Callable[[], list[Rewards]]:
        """Read a call that has ended; return what gives the rewards of `items`, in one part or in one for each.

        It waits for the calls of each item alone, which begin here after a call that failed.
        """
        try:
            found = self._read(call, len(items))
        except WorkerError as error:
            if len(items) > 1 or error.kind == GONE:  # the node of the worker is lost, so try again
                alone = [(item, self._ask([item], step, True)) for item in items]
                return partial(self._apart, alone, step, error)
            found = self._failed(items[0], error)
        return lambda: [found]

    def _apart(self, alone: list[tuple[Item, Future[Any]]], step: int, whole: WorkerError) -> list[Rewards]:
        """Return the rewards of items of which each is asked for alone, since their call together failed."""
        parts = [part for item, call in alone for part in self._taken([item], call, step)()]
        if whole.kind == RAISED and not any(part.failed is not None for part in parts):
            raise RewardError(f"{whole}, for {len(alone)} responses to a prompt together, but for none of them alone")
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
            hint += ", timeout.reward how long it may take (half of it alone)" if error.kind == LATE else ""
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
            raise RewardError(of_load(reward.remote_url or reward.function or reward.preset, error)) from error

    def close(self) -> None:
        """End the workers."""
        self._pool.close()

    def _begin(self, items: Sequence[Item], step: int, timeout_s: float) -> Future[Any]:
        return self._pool.submit("answer", items, step, timeout_s=timeout_s)

    def _parsed(self, answer: Any, count: int) -> Rewards:
        return parse_answer(answer, count, self.where, self._none)


class RewardServer(WorkServer):
    """Answers requests by calls of `answer(items, step)`."""

    def begin(self, body: dict[str, Any]) -> Future[Any]:
        return self.pool.submit("answer", items_in(body), int(body.get("step") or 0), timeout_s=self._limit_s(body))

    def _limit_s(self, body: dict[str, Any]) -> float:
        """Return how long the call of a request may take: not longer than its client waits, if it says how long."""
        return min(float(body.get("timeout_s") or self.timeout_s), self.timeout_s)

    def said(self, answer: Any) -> Any:
        return answer if isinstance(answer, dict) else {"rewards": answer}


class _Asked(NamedTuple):
    items: list[Item]
    limit_s: float
    answer: Future[Any]


class ModelServer(RewardServer):
    """Joins all waiting requests into one call: a model computes one large batch faster than several small ones."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._lock, self._calls = threading.Lock(), 0
        self._waiting: list[_Asked] = []

    def begin(self, body: dict[str, Any]) -> Future[Any]:
        asked = _Asked(items_in(body), self._limit_s(body), Future())
        with self._lock:
            self._waiting.append(asked)
        self._next()
        return asked.answer

    def _next(self) -> None:
        """Submit the waiting requests, if a worker is free."""
        with self._lock:
            if self._calls >= self.pool.count:
                return
            taken = [asked for asked in self._waiting if asked.answer.set_running_or_notify_cancel()]
            self._waiting = []
            if not taken:
                return
            self._calls += 1
        self._submit(taken)

    def _submit(self, taken: list[_Asked]) -> None:
        items = [item for asked in taken for item in asked.items]
        call = self.pool.submit("answer", items, 0, timeout_s=max(asked.limit_s for asked in taken))
        call.add_done_callback(partial(self._answered, taken))

    def _answered(self, taken: list[_Asked], call: Future[Any]) -> None:
        with self._lock:
            self._calls -= 1
        try:
            scores = iter(call.result())
        except (WorkerError, CancelledError) as error:
            again = len(taken) > 1 and getattr(error, "kind", LATE) != LATE and not self.pool.closed
            with self._lock:
                self._calls += again * len(taken)
            for asked in taken:
                if again:  # one of them made the call fail, so each gets a call of its own
                    self._submit([asked])
                else:
                    asked.answer.set_exception(error)
        else:
            for asked in taken:
                asked.answer.set_result([next(scores) for _ in asked.items])
        self._next()


def items_in(body: dict[str, Any]) -> list[Item]:
    """Read the items of a request. Raises ValueError."""
    if "items" in body:
        items = body["items"]
        if not isinstance(items, list) or not all(Item.__annotations__.keys() <= item.keys() for item in items):
            raise ValueError(f"items must have {', '.join(Item.__annotations__)}")
        return items
    queries, prompts, labels = (body.get(name) for name in ("query", "prompts", "labels"))
    if not (isinstance(queries, list) and isinstance(prompts, list) and len(prompts) == len(queries)):
        raise ValueError("expected the lists query and prompts, equally long")
    labels = labels if isinstance(labels, list) and len(labels) == len(queries) else [None] * len(queries)
    return [
        Item(
            prompt=prompt,
            messages=None,
            response=(response := query.removeprefix(prompt)),
            dialogue=answered(response),
            prompt_ids=[],
            response_ids=[],
            label=label,
            row={},
            finish_reason="stop",
            version=0,
            turns=1,
        )
        for query, prompt, label in zip(queries, prompts, labels, strict=True)
    ]


AT_ONCE = 32
"""Most requests in flight."""
OF_LIMIT = 0.9
"""Share of timeout.reward that a server gets for a call: it has to report a late reward before it counts as silent."""


class RemoteRewards(CalledRewards):
    """Asks servers in turn; requests for the responses to each prompt are in flight together."""

    def __init__(self, config: Config, note: Callable[[str], None], printed: Path | None = None) -> None:
        """`note` tells the user that no server answers, and that one does again; `printed` as in `CalledRewards`.

        Raises ConfigError.
        """
        reward, limit_s = config.reward, config.timeout.reward
        super().__init__(config, printed, OF_LIMIT * limit_s)
        token = token_of(reward.token, "reward.token")
        self.servers = Servers(reward.remote_url, token, note, at_once=AT_ONCE, silence_s=limit_s, total_s=limit_s)

    def close(self) -> None:
        """Give up requests in flight, and close the connections."""
        self.servers.close()

    def _begin(self, items: Sequence[Item], step: int, timeout_s: float) -> Future[Any]:
        return self.servers.requests.submit(self._asked, items, step, timeout_s)

    def _asked(self, items: Sequence[Item], step: int, timeout_s: float) -> tuple[str, Any]:
        """Return the server that answered, and its answer; blocks, also while no server answers.

        Raises WorkerError for a call that has failed there, RewardError for a request that no server takes.
        """
        body = {
            "query": [item["prompt"] + item["response"] for item in items],
            "prompts": [item["prompt"] for item in items],
            "labels": [item["label"] for item in items],
            "items": items,
            "step": step,
            "timeout_s": timeout_s,
        }
        try:
            return self.servers.ask(body)
        except WorkerError as error:
            if error.kind == UNANSWERED:
                raise RewardError(str(error)) from error
            raise WorkerError(error.kind if error.kind in (LATE, ENDED, MEMORY) else RAISED, str(error)) from error

    def _parsed(self, answer: tuple[str, Any], count: int) -> Rewards:
        server, said = answer
        if isinstance(said, dict):
            said = {name: said[name] for name in KEYS if name in said}
        return parse_answer(said, count, server, none=True)
