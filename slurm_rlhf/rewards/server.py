"""Rewards over HTTP: the server of `slurm-rlhf serve-reward`, in the workers of its machine, and the client.

OpenRLHF: POST {"query", "prompts", "labels"} -> {"rewards", "scores"?, "extra_logs"?}. Our request has `items`, `step`
and `timeout_s`, too, which other servers ignore; an answer may have `components`, and null where a reward does not
apply. The server makes the items of a request without `items` from its three fields.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import RewardError, WorkerError
from slurm_rlhf.rewards.items import Item, answered
from slurm_rlhf.rewards.pooled import CalledRewards
from slurm_rlhf.rewards.scored import KEYS, Rewards, parse_answer
from slurm_rlhf.workers.http import UNANSWERED, Servers, WorkServer, token_of
from slurm_rlhf.workers.pool import ENDED, LATE, MEMORY, RAISED


class RewardServer(WorkServer):
    """Answers requests by calls of `answer(items, step)`."""

    def begin(self, body: dict[str, Any]) -> Future[Any]:
        return self.pool.submit("answer", items_in(body), int(body.get("step") or 0), timeout_s=self._limit_s(body))

    def _limit_s(self, body: dict[str, Any]) -> float:
        """Return how long the call of a request may take: no longer than its client waits, if that says so."""
        return min(float(body.get("timeout_s") or self.timeout_s), self.timeout_s)

    def said(self, answer: Any) -> Any:
        return answer if isinstance(answer, dict) else {"rewards": answer}


class _Asked(NamedTuple):
    items: list[Item]
    limit_s: float
    answer: Future[Any]


class ModelServer(RewardServer):
    """Joins the requests that wait into one call: a model takes a large batch faster than several small ones."""

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
        """Submit what waits, if a worker is free."""
        with self._lock:
            if self._calls == self.pool.count:
                return
            taken = [asked for asked in self._waiting if asked.answer.set_running_or_notify_cancel()]
            self._waiting = []
            if not taken:
                return
            self._calls += 1
        items = [item for asked in taken for item in asked.items]
        call = self.pool.submit("answer", items, 0, timeout_s=max(asked.limit_s for asked in taken))
        call.add_done_callback(partial(self._answered, taken))

    def _answered(self, taken: list[_Asked], call: Future[Any]) -> None:
        with self._lock:
            self._calls -= 1
        try:
            scores = iter(call.result())
        except (WorkerError, CancelledError) as error:
            for asked in taken:
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
"""Requests in flight at most."""
OF_LIMIT = 0.9
"""Share of timeout.reward that our server gets: it says that a reward is late before it counts as away itself."""


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
        """Give up what is asked, and close the connections."""
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
