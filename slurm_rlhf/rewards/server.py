"""Serve rewards over HTTP, in the workers of this machine: what `slurm-rlhf serve-reward` runs.

It answers the requests of `remote`, and of OpenRLHF, whose three fields make the items of a request without `items`.
"""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError, Future
from functools import partial
from typing import Any

from slurm_rlhf.errors import WorkerError
from slurm_rlhf.rewards.items import Item
from slurm_rlhf.workers.http_server import WorkServer


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
