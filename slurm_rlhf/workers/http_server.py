"""Serves the workers of this machine over HTTP: the common part of `serve-reward` and `serve-env`."""

from __future__ import annotations

import hmac
import json
import sys
from abc import ABC, abstractmethod
from concurrent.futures import CancelledError, Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from slurm_rlhf.errors import WorkerError
from slurm_rlhf.wire import timeouts
from slurm_rlhf.workers.http_client import HEALTH, LARGEST, REFUSED
from slurm_rlhf.workers.pool import WorkerPool


class WorkServer(ThreadingHTTPServer, ABC):
    """Answers each request by a call in a pool, which `begin` submits."""

    daemon_threads = True
    request_queue_size = 256
    beat_s: float | None = None
    """Seconds after which a client that waits is told that the call goes on; None: never, its own time-out counts."""

    def __init__(self, address: tuple[str, int], pool: WorkerPool, timeout_s: float, serves: str, token: str) -> None:
        """`timeout_s`: of a call; `serves`: what, for people; `token`: what a request has to bring; empty: nothing."""
        super().__init__(address, _Request)
        self.pool, self.timeout_s, self.serves, self.token = pool, timeout_s, serves, token

    @abstractmethod
    def begin(self, body: dict[str, Any]) -> Future[Any]:
        """Submit the call that a request asks for. Raises ValueError, TypeError, KeyError for a wrong request, and
        WorkerError."""

    def said(self, answer: Any) -> Any:
        """Return what is sent for the answer of a call."""
        return answer


class _Request(BaseHTTPRequestHandler):
    server: WorkServer
    protocol_version = "HTTP/1.1"
    timeout = timeouts.SERVER_IDLE_S  # silence of a connection, which is closed then
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        if self.path == HEALTH:
            self._say(200, {"status": "ok", "serves": self.server.serves})
        else:
            self._say(404, {})

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
            if not isinstance(body, dict):
                raise ValueError("expected an object")
            answer = self._result(self.server.begin(body))
        except (ValueError, AttributeError, TypeError, KeyError) as error:
            self._say(400, {"error": f"{type(error).__name__}: {error}"})
        except (WorkerError, CancelledError) as error:
            if self.server.pool.closed:  # the server ends: another one, or the next one here, may answer
                self.close_connection = True
                self._say(503, {"error": "the server ends"})
                return
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            self._say(REFUSED, {"kind": getattr(error, "kind", ""), "error": str(error)})
        else:
            self._say(200, self.server.said(answer))

    def _result(self, call: Future[Any]) -> Any:
        """Wait for a call; meanwhile tell the client in each `beat_s` that it goes on."""
        while True:
            try:
                return call.result(self.server.beat_s)
            except TimeoutError:
                self.send_response_only(102)
                self.end_headers()

    def _say(self, status: int, answer: Any) -> None:
        text = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Leave out a line for each request."""
