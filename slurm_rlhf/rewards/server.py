"""Rewards over HTTP: the server of `slurm-rlhf serve-reward`, in the workers of its machine, and the client.

OpenRLHF: POST {"query", "prompts", "labels"} -> {"rewards", "scores"?, "extra_logs"?}. Our request has `items` and
`step`, too, which other servers ignore; an answer may have `components`, and null where a reward does not apply. The
server makes the items of a request without `items` from its three fields.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from functools import partial
from typing import Any

from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import RewardError, WorkerError
from slurm_rlhf.records import Prompt, Trajectory
from slurm_rlhf.rewards.items import Item, by_prompt, items_of
from slurm_rlhf.rewards.scored import KEYS, Rewards, joined, parse_answer
from slurm_rlhf.workers.http import Servers, WorkServer, token_of


class RewardServer(WorkServer):
    """Answers requests by calls of `answer(items, step)`."""

    def begin(self, body: dict[str, Any]) -> Future[Any]:
        return self.pool.submit("answer", items_in(body), int(body.get("step") or 0), timeout_s=self.timeout_s)

    def said(self, answer: Any) -> Any:
        return answer if isinstance(answer, dict) else {"rewards": answer}


class ModelServer(RewardServer):
    """Joins the requests that wait into one call: a model takes a large batch faster than several small ones."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._lock, self._calls = threading.Lock(), 0
        self._waiting: list[tuple[list[Item], Future[Any]]] = []

    def begin(self, body: dict[str, Any]) -> Future[Any]:
        asked: tuple[list[Item], Future[Any]] = (items_in(body), Future())
        with self._lock:
            self._waiting.append(asked)
        self._next()
        return asked[1]

    def _next(self) -> None:
        """Submit what waits, if a worker is free."""
        with self._lock:
            if not self._waiting or self._calls == self.pool.count:
                return
            taken, self._waiting, self._calls = self._waiting, [], self._calls + 1
        items = [item for part, _ in taken for item in part]
        call = self.pool.submit("answer", items, 0, timeout_s=self.timeout_s)
        call.add_done_callback(partial(self._answered, taken))

    def _answered(self, taken: list[tuple[list[Item], Future[Any]]], call: Future[Any]) -> None:
        with self._lock:
            self._calls -= 1
        try:
            scores = iter(call.result())
        except (WorkerError, CancelledError) as error:
            for _, asked in taken:
                asked.set_exception(error)
        else:
            for part, asked in taken:
                asked.set_result([next(scores) for _ in part])
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
            response=query.removeprefix(prompt),
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


class RemoteRewards:
    """Asks servers in turn; requests for the responses to each prompt are in flight together."""

    streams = True
    """The responses to a prompt may be scored while others are sampled."""

    def __init__(self, config: Config, note: Callable[[str], None]) -> None:
        """`note` tells the user that no server answers, and that one does again. Raises ConfigError."""
        reward, self._input_key = config.reward, config.data.input_key
        token, limit_s = token_of(reward.token, "reward.token"), config.timeout.reward
        self.servers = Servers(reward.remote_url, token, note, at_once=AT_ONCE, silence_s=limit_s, total_s=limit_s)

    def close(self) -> None:
        """Give up what is asked, and close the connections."""
        self.servers.close()

    def __call__(self, prompts: list[Prompt], trajectories: list[Trajectory], step: int = 0) -> Rewards:
        """Compute the rewards of `trajectories`, [N]; blocks, also while no server answers.

        Raises RewardError for what a server refuses or answers wrongly.
        """
        items = items_of(prompts, trajectories, self._input_key)
        groups = [[items[place] for place in places] for places in by_prompt(prompts)]
        if not groups:
            return parse_answer([], 0, "the servers")
        return joined(list(self.servers.requests.map(lambda group: self._score(group, step), groups)))

    def _score(self, items: Sequence[Item], step: int) -> Rewards:
        body = {
            "query": [item["prompt"] + item["response"] for item in items],
            "prompts": [item["prompt"] for item in items],
            "labels": [item["label"] for item in items],
            "items": items,
            "step": step,
        }
        try:
            server, answer = self.servers.ask(body)
        except WorkerError as error:
            raise RewardError(str(error)) from error
        if isinstance(answer, dict):
            answer = {name: answer[name] for name in KEYS if name in answer}
        return parse_answer(answer, len(items), server, none=True)
