"""Serve a reward function over HTTP, in the workers of this machine: what `slurm-rlhf serve-reward` runs.

It answers the requests of `remote`, and of OpenRLHF, whose three fields make the items of a request without `items`.
"""

from __future__ import annotations

import hmac
import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from slurm_rlhf.errors import RewardError, WorkerError
from slurm_rlhf.rewards.items import Item
from slurm_rlhf.rewards.remote import HEALTH, LARGEST
from slurm_rlhf.wire import timeouts
from slurm_rlhf.workers.pool import WorkerPool


class RewardServer(ThreadingHTTPServer):
    """Answers requests by calls of `answer(items, step)` in a pool."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], pool: WorkerPool, timeout_s: float, token: str = "") -> None:
        """`timeout_s`: of a call; `token`: what a request has to bring; empty: nothing."""
        super().__init__(address, _Request)
        self.pool, self.timeout_s, self.token = pool, timeout_s, token


def items_in(body: Any) -> list[Item]:
    """Read the items of a request. Raises ValueError."""
    if not isinstance(body, dict):
        raise ValueError("expected an object")
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


class _Request(BaseHTTPRequestHandler):
    server: RewardServer
    protocol_version = "HTTP/1.1"
    timeout = timeouts.REWARD_IDLE_S  # silence of a connection, which is closed then

    def do_GET(self) -> None:
        self._say(200 if self.path == HEALTH else 404, {"status": "ok"} if self.path == HEALTH else {})

    def do_POST(self) -> None:
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if self.server.token and not hmac.compare_digest(given.encode(), self.server.token.encode()):
            self.close_connection = True  # its body is not read
            self._say(401, {"error": "the token is missing or another one"})
            return
        length = self.headers.get("Content-Length", "")
        if not length.isdigit() or int(length) > LARGEST:
            self.close_connection = True
            self._say(413, {"error": f"send Content-Length, {LARGEST} bytes at most"})
            return
        try:
            body = json.loads(self.rfile.read(int(length)))
            items = items_in(body)
        except (ValueError, AttributeError, TypeError) as error:
            self._say(400, {"error": str(error)})
            return
        self._score(items, int(body.get("step") or 0))

    def _score(self, items: list[Item], step: int) -> None:
        call = self.server.pool.submit("answer", items, step, timeout_s=self.server.timeout_s)
        try:
            answer = call.result()
        except (WorkerError, RewardError) as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            self._say(422, {"error": str(error)})
            return
        self._say(200, answer if isinstance(answer, dict) else {"rewards": answer})

    def _say(self, status: int, answer: dict[str, Any]) -> None:
        text = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Leave out a line for each request."""
