"""Compute rewards by servers over HTTP: OpenRLHF's request and answer, and with all fields by `serve-reward`.

OpenRLHF: POST {"query", "prompts", "labels"} -> {"rewards", "scores"?, "extra_logs"?}. The request has `items` and
`step` beside them, which its servers ignore; an answer may have `components`, and null where a reward does not apply.
A server that is down, busy or at fault is asked again, the next one first, until one answers.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import ConfigError, RewardError, cut
from slurm_rlhf.observe.run_log import SERVER_AWAITED, SERVER_BACK
from slurm_rlhf.records import Prompt, Trajectory
from slurm_rlhf.rewards.items import Item, by_prompt, items_of
from slurm_rlhf.rewards.scored import Rewards, joined, parse_answer
from slurm_rlhf.wire import timeouts

HEALTH = "/health"
LARGEST = 64 << 20
"""Bytes of an answer at most."""
AT_ONCE = 32
"""Requests in flight at most."""
_PASSING = (408, 425, 429, 500, 502, 503, 504)
"""Status of a server that may answer later."""


def servers_of(remote_url: str) -> list[str]:
    """List the URLs of servers in the key; empty: it names a file."""
    return [url.strip() for url in remote_url.split(",")] if remote_url.startswith(("http://", "https://")) else []


def token_of(token: str) -> str:
    """Read the token that reward.token names: `env:VARIABLE` or a file. Raises ConfigError."""
    if not token:
        return ""
    kind, _, name = token.partition(":")
    if kind == "env":
        if not os.environ.get(name):
            raise ConfigError(f"reward.token = {token}: the variable {name} is not set: export it, or name a file")
        return os.environ[name].strip()
    try:
        return Path(token).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"reward.token: {token} cannot be read: {error}") from error


class RemoteRewards:
    """Asks servers in turn; requests for the responses to each prompt are in flight together."""

    streams = True
    """The responses to a prompt may be scored while others are sampled."""

    def __init__(self, config: Config, note: Callable[[str], None]) -> None:
        """`note` tells the user that no server answers, and that one does again. Raises ConfigError."""
        import httpx

        self._servers = servers_of(config.reward.remote_url)
        self._timeout_s, self._input_key, self._note = config.timeout.reward, config.data.input_key, note
        token = token_of(config.reward.token)
        self._http = httpx.Client(
            headers={"Authorization": f"Bearer {token}"} if token else {},
            timeout=httpx.Timeout(config.timeout.reward, connect=timeouts.CONNECT_S, pool=None),
            limits=httpx.Limits(max_connections=AT_ONCE),
            trust_env=False,
        )
        self._errors = httpx.HTTPError
        self.waits: Callable[[], None] = lambda: None
        """Is called again and again while no server answers."""
        self._turn = count()
        self._requests = ThreadPoolExecutor(AT_ONCE, "reward request")
        self._closed, self._lock, self._down = threading.Event(), threading.Lock(), False
        self._answered = 0.0  # when a server answered last

    def close(self) -> None:
        """Give up what is asked, and close the connections."""
        self._closed.set()
        self._requests.shutdown(wait=False, cancel_futures=True)
        self._http.close()

    def unhealthy(self) -> list[str]:
        """Ask each server whether it is there; list those that are not, and why. Any answer but 5xx is one."""
        found = []
        for server in self._servers:
            try:
                status = self._http.get(server.rstrip("/") + HEALTH, timeout=timeouts.CONNECT_S).status_code
            except self._errors as error:
                found.append(f"{server}: {type(error).__name__}: {error}")
            else:
                if status in (401, 403) or status >= 500:
                    found.append(f"{server}: status {status}")
        return found

    def __call__(self, prompts: list[Prompt], trajectories: list[Trajectory], step: int = 0) -> Rewards:
        """Compute the rewards of `trajectories`, [N]; blocks, also while no server answers.

        Raises RewardError for what a server refuses or answers wrongly.
        """
        items = items_of(prompts, trajectories, self._input_key)
        groups = [[items[place] for place in places] for places in by_prompt(prompts)]
        if not groups:
            return parse_answer([], 0, "the servers")
        return joined(list(self._requests.map(lambda group: self._score(group, step), groups)))

    def _score(self, items: Sequence[Item], step: int) -> Rewards:
        body = {
            "query": [item["prompt"] + item["response"] for item in items],
            "prompts": [item["prompt"] for item in items],
            "labels": [item["label"] for item in items],
            "items": items,
            "step": step,
        }
        first, tries, since = next(self._turn), 0, time.monotonic()
        while not self._closed.is_set():
            server = self._servers[(first + tries) % len(self._servers)]
            answer, why, pause_s = self._asked(server, body)
            if not why:
                self._answered = time.monotonic()
                self._tell(False, f"{SERVER_BACK}: the run goes on")
                return parse_answer(answer, len(items), server, none=True)
            tries += 1
            if time.monotonic() - max(since, self._answered) > timeouts.REWARD_AWAITED_S:
                self._tell(True, f"{SERVER_AWAITED}: {why}")
                self.waits()
            pause_s = pause_s or min(timeouts.REWARD_RETRY_S, 0.05 * 2 ** min(tries, 10))
            self._closed.wait(pause_s * random.uniform(0.5, 1.0) if tries >= len(self._servers) else 0)
        raise RewardError("the connections to the reward servers were closed")

    def _asked(self, server: str, body: dict[str, Any]) -> tuple[Any, str, float]:
        """Ask a server; return its answer, or why it may answer later, and after how many seconds it wants that."""
        until = time.monotonic() + self._timeout_s
        try:
            with self._http.stream("POST", server, json=body) as answered:
                text = bytearray()
                for piece in answered.iter_bytes():
                    text += piece
                    if len(text) > LARGEST:
                        raise RewardError(f"{server} answered more than {LARGEST >> 20} MiB: let it answer less")
                    if time.monotonic() > until:
                        return None, f"{server} did not answer within {self._timeout_s:g} s", 0.0
                status = answered.status_code
                if status in _PASSING:
                    return None, f"{server} answered status {status}", _seconds(answered.headers.get("Retry-After", ""))
                if status >= 300:
                    said = cut(bytes(text).decode(errors="replace"), 200)
                    raise RewardError(f"{server} answered status {status}: {said}: correct reward.remote_url or token")
        except self._errors as error:
            return None, f"{server}: {type(error).__name__}: {error}", 0.0
        return _json(bytes(text), server)

    def _tell(self, down: bool, text: str) -> None:
        with self._lock:
            changed, self._down = self._down is not down, down
        if changed:
            self._note(text)


def _seconds(header: str) -> float:
    with suppress(ValueError):
        return min(max(float(header), 0.0), 60.0)
    return 0.0


def _json(text: bytes, server: str) -> tuple[Any, str, float]:
    import json

    try:
        answer = json.loads(text)
    except ValueError:
        return None, f"{server} answered what is no JSON: {cut(text.decode(errors='replace'), 80)!r}", 0.0
    if isinstance(answer, dict):
        answer = {name: answer[name] for name in ("rewards", "scores", "extra_logs", "components") if name in answer}
    return answer, "", 0.0
