"""Workers over HTTP: the servers of `serve-reward` and `serve-env`, and the client, also of other servers.

A server that is down, busy or at fault is asked again, the next one first, with growing pauses until one answers. What
a server refuses is no fault of its own: the request is not repeated.
"""

from __future__ import annotations

import hmac
import json
import math
import os
import random
import select
import socket
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from email.utils import parsedate_to_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from slurm_rlhf.errors import ConfigError, WorkerError, cut
from slurm_rlhf.observe.run_log import SERVER_AWAITED, SERVER_BACK
from slurm_rlhf.polling import UNDER_WAY
from slurm_rlhf.wire import timeouts
from slurm_rlhf.workers.pool import GONE, RAISED, WorkerPool

if TYPE_CHECKING:
    from slurm_rlhf.config.schema import Config

HEALTH = "/health"
LARGEST = 64 << 20
"""Bytes of a request, and of an answer, at most."""
REFUSED = 422
"""Status of a call that failed on the server; the answer has `kind` and `error` of its WorkerError."""
UNANSWERED = "unanswered"
"""Kind of the WorkerError for a request that was refused as such, or given up as the connections were closed."""
_PASSING, _LASTING = (408, 425, 429), (501, 505)
"""Status below 500 of a server that may answer later, and from 500 on of one that never will."""


def servers_of(value: str) -> list[str]:
    """List the URLs of servers in a key's value; empty: it names a file."""
    return [url.strip() for url in value.split(",")] if value.startswith(("http://", "https://")) else []


def token_of(token: str, key: str) -> str:
    """Read the token that `key` names: `env:VARIABLE` or a file. Raises ConfigError."""
    if not token:
        return ""
    kind, _, name = token.partition(":")
    if kind == "env":
        if not os.environ.get(name):
            raise ConfigError(f"{key} = {token}: the variable {name} is not set: export it, or name a file")
        return os.environ[name].strip()
    try:
        return Path(token).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        file = token if os.path.isdir(os.path.dirname(token)) else "its file"  # else it may be the token itself
        why = getattr(error, "strerror", "it is no text")
        raise ConfigError(
            f"{key}: {file} cannot be read: {why}: write env:VARIABLE, or the file of the token"
        ) from None


class Servers:
    """Asks one of several servers, in turn. All methods may be called from any thread."""

    def __init__(
        self,
        value: str,
        token: str,
        note: Callable[[str], None],
        *,
        at_once: int,
        silence_s: float,
        total_s: float = math.inf,
    ) -> None:
        """`value`: URLs, as `servers_of` reads them; `at_once`: requests in flight at most.

        `silence_s`: of a server, after which it counts as away, as after `total_s` of a request. `note` tells the user
        that no server answers, and that one does again.
        """
        import httpx

        self.urls, self._total_s, self._note = servers_of(value), total_s, note
        self._http = httpx.Client(
            headers={"Authorization": f"Bearer {token}"} if token else {},
            timeout=httpx.Timeout(silence_s, connect=timeouts.CONNECT_S, pool=None),
            limits=httpx.Limits(max_connections=at_once, max_keepalive_connections=at_once),
            trust_env=False,
        )
        self._errors = httpx.HTTPError
        self.waits: Callable[[], None] = lambda: None
        """Is called again and again while no server answers."""
        self._turn = count()
        self.requests = ThreadPoolExecutor(at_once, "request")
        """Threads for requests."""
        self._closed, self._lock, self._down = threading.Event(), threading.Lock(), False
        self._answered = 0.0  # when a server answered last

    def close(self) -> None:
        """Give up what is asked, and close the connections."""
        self._closed.set()
        self.requests.shutdown(wait=False, cancel_futures=True)
        self._http.close()

    def ask(self, body: Any, only: str = "") -> tuple[str, Any]:
        """Send a request; return the server that answered, and its answer, as JSON has it. Blocks.

        `only`: asks this server alone, and once. Raises WorkerError for what a server refuses, of kind `gone` where
        `only` does not answer, of kind `unanswered` for a status that says the request is wrong, and once this is
        closed.
        """
        first, tries, since = next(self._turn), 0, time.monotonic()
        while not self._closed.is_set():
            server = only or self.urls[(first + tries) % len(self.urls)]
            limit_s = body.get("timeout_s", 0.0) if math.isinf(self._total_s) else self._total_s
            with UNDER_WAY.one(limit_s):
                answer, why, asked_s = self._asked(server, body)
            if not why:
                self._answered = time.monotonic()
                self._tell(False, f"{SERVER_BACK}: the run goes on")
                return server, answer
            if only:
                raise WorkerError(GONE, why)
            tries += 1
            if time.monotonic() - max(since, self._answered) > timeouts.SERVER_AWAITED_S:
                self._tell(True, f"{SERVER_AWAITED}: {why}")
                self.waits()
            pause_s = min(timeouts.SERVER_RETRY_S, 0.05 * 2 ** min(tries, 10)) * random.uniform(0.5, 1.0)
            self._pause((asked_s or pause_s) if tries >= len(self.urls) else 0.0)
        raise WorkerError(UNANSWERED, "the connections to the servers were closed")

    def _pause(self, pause_s: float) -> None:
        while pause_s > timeouts.SERVER_RETRY_S and not self._closed.wait(timeouts.SERVER_RETRY_S):
            self.waits()
            pause_s -= timeouts.SERVER_RETRY_S
        self._closed.wait(pause_s)

    def _asked(self, server: str, body: Any) -> tuple[Any, str, float]:
        """Ask a server; return its answer, or why it may answer later, and after how many seconds it wants that."""
        until = time.monotonic() + self._total_s
        try:
            with self._http.stream("POST", server, json=body) as answered:
                text, status = bytearray(), answered.status_code
                for piece in answered.iter_bytes():
                    text += piece
                    if len(text) > LARGEST:
                        raise WorkerError(RAISED, f"{server} answered more than {LARGEST >> 20} MiB: let it say less")
                    if time.monotonic() > until:
                        return None, f"{server} did not answer within {self._total_s:g} s", 0.0
                if status in _PASSING or (status >= 500 and status not in _LASTING):
                    return None, f"{server} answered status {status}", _seconds(answered.headers.get("Retry-After", ""))
        except self._errors as error:
            return None, f"{server}: {type(error).__name__}: {error}", 0.0
        said = cut(bytes(text).decode(errors="replace"), 200)
        try:
            answer = json.loads(bytes(text))
        except ValueError:
            answer = None
            if status < 300:
                return None, f"{server} answered what is no JSON: {said!r}", 0.0
        if status == REFUSED and isinstance(answer, dict) and isinstance(answer.get("error"), str):
            raise WorkerError(str(answer.get("kind", RAISED)), f"{server}: {answer['error']}")
        if status >= 300:
            raise WorkerError(
                UNANSWERED, f"{server} answered status {status}: {said}: correct the address or the token"
            )
        return answer, "", 0.0

    def _tell(self, down: bool, text: str) -> None:
        with self._lock:
            if self._down is not down:
                self._note(text)  # where it raises, so does each request
                self._down = down


def _seconds(header: str) -> float:
    """Read a Retry-After: seconds, or a date; 0 for none."""
    asked_s = 0.0
    try:
        asked_s = float(header)
    except ValueError:
        with suppress(ValueError):
            asked_s = parsedate_to_datetime(header).timestamp() - time.time()
    return min(max(0.0, asked_s), timeouts.SERVER_ASKED_S)


class Health(NamedTuple):
    """Says how a server is."""

    key: str  # names it
    url: str
    serves: str  # in its own words; empty: it does not say
    away: str  # why it is of no use; empty: it is there


def health_of(config: Config) -> list[Health]:
    """Ask each server of a run whether it is there, all at once; blocks for a few seconds. Raises ConfigError."""
    reward = config.reward
    values = [("reward.remote_url", reward.remote_url, reward.token), ("env.path", config.env.path, config.env.token)]
    values += [(f"reward.sources, {part.name}", part.remote_url, reward.token) for part in reward.sources]
    asked = [
        (key, url, token_of(token, f"{key.partition('.')[0]}.token"))
        for key, value, token in values
        for url in servers_of(value)
    ]
    with ThreadPoolExecutor(len(asked) or 1) as threads:
        return list(threads.map(lambda one: _health(*one), asked))


def _health(key: str, url: str, token: str) -> Health:
    """Ask one server. Any answer but 401, 403 and 5xx is one: servers of others need not know the page."""
    import httpx

    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        found = httpx.get(url.rstrip("/") + HEALTH, headers=headers, timeout=timeouts.CONNECT_S, trust_env=False)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return Health(key, url, "", f"{type(error).__name__}: {error}")
    status, serves = found.status_code, ""
    with suppress(ValueError, AttributeError):
        serves = str(found.json().get("serves", ""))
    return Health(key, url, serves, f"status {status}" if status in (401, 403) or status >= 500 else "")


class WorkServer(ThreadingHTTPServer, ABC):
    """Answers each request by a call in a pool, which `begin` submits."""

    daemon_threads = True
    request_queue_size = 256
    beat_s: float | None = None
    """Seconds after which a client that waits hears that the call goes on; None: never, its own time-out counts."""

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

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Leave out clients that have gone; say in a line what else broke off a request."""
        if not isinstance(error := sys.exception(), ConnectionError):
            print(f"{client_address[0]}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)


class _Request(BaseHTTPRequestHandler):
    server: WorkServer
    protocol_version = "HTTP/1.1"
    timeout = timeouts.SERVER_IDLE_S  # silence of a connection, which is closed then
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        if self.path != HEALTH:
            self._say(404, {})
        elif self._admitted():
            self._say(200, {"status": "ok", "serves": self.server.serves})

    def do_POST(self) -> None:
        if not self._admitted():
            return
        length = self.headers.get("Content-Length", "")
        if not (length.isdecimal() and len(length) < 10 and int(length) <= LARGEST):
            self.close_connection = True
            self._say(413, {"error": f"send Content-Length, {LARGEST} bytes at most"})
            return
        try:
            body = json.loads(self.rfile.read(int(length)))
            if not isinstance(body, dict):
                raise ValueError("expected an object")
            answer = self._result(self.server.begin(body))
        except (ValueError, AttributeError, TypeError, KeyError, OverflowError, RecursionError) as error:
            self._say(400, {"error": f"{type(error).__name__}: {error}"})
        except (WorkerError, CancelledError) as error:
            if (alone := self._alone()) or self.server.pool.closed:
                self.close_connection = True
                if not alone:  # the server ends: another one, or the next one here, may answer
                    self._say(503, {"error": "the server ends"})
                return
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            self._say(REFUSED, {"kind": getattr(error, "kind", ""), "error": str(error)})
        else:
            self._say(200, self.server.said(answer))

    def _admitted(self) -> bool:
        """Tell whether the request has the token; answer it if not."""
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        known = not self.server.token or hmac.compare_digest(given.encode(), self.server.token.encode())
        if not known:
            self.close_connection = True  # its body is not read
            self._say(401, {"error": "the token is missing or another one"})
        return known

    def _result(self, call: Future[Any]) -> Any:
        """Wait for a call; meanwhile tell the client in each `beat_s` that it goes on.

        Cancels it if its client has gone, unless it has begun.
        """
        while True:
            try:
                return call.result(self.server.beat_s or timeouts.SERVER_LOOK_S)
            except TimeoutError:
                if self._alone():
                    call.cancel()
                elif self.server.beat_s:
                    self.send_response_only(102)
                    self.end_headers()

    def _alone(self) -> bool:
        """Tell whether the client has closed its connection."""
        coming = select.poll()
        coming.register(self.connection, select.POLLIN)
        try:
            return bool(coming.poll(0)) and not self.connection.recv(1, socket.MSG_PEEK)
        except OSError:
            return True

    def _say(self, status: int, answer: Any) -> None:
        text = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Leave out a line for each request."""
