"""Has workers on other nodes: here a thread stands for each, there `HostedWorkers` are asked.

The agent of a node that is kept for workers does what it is asked with calls of these.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, wait
from contextlib import suppress
from pathlib import Path
from typing import Any

from slurm_rlhf.errors import RunError, WireError, WorkerError
from slurm_rlhf.wire import timeouts
from slurm_rlhf.workers.pool import ENDED, GONE, RAISED, Code, PoolCall, PoolWorker, WorkerPool
from slurm_rlhf.workers.process import packed


class DistantNode(ABC):
    """Is such a node, as `WorkerNode`. Any thread may use it."""

    name: str

    def worker(self, pool: WorkerPool, number: int) -> PoolWorker:
        return DistantWorker(pool, number, self)

    @abstractmethod
    def ask(self, method: str, key: str, arguments: str, limit_s: float) -> Future[str]:
        """Have its `HostedWorkers` do something; arguments and answer are JSON. Waits for a node that is starting.

        It and the Future raise RunError where the node does not answer.
        """

    @abstractmethod
    def absence(self, silence_s: float = math.inf) -> str:
        """Say why it cannot answer any more, or that it was silent for so long; empty: it can."""

    @abstractmethod
    def lose(self, why: str) -> None:
        """Tell the user that it is lost, once."""


class DistantWorker(PoolWorker):
    """Stands for a worker that another node has: deadlines, the limit of memory and replacement are there."""

    def __init__(self, pool: WorkerPool, number: int, node: DistantNode) -> None:
        super().__init__(pool, number)
        self._node, self._key = node, f"{id(pool)}.{number}"
        self._open = False
        self._stack_there: Future[str] = Future()

    @property
    def there(self) -> bool:
        return self._open or bool(self.lost)

    def _start(self) -> None:
        log = self.pool.printed and self.pool.printed.with_suffix(f".{self._node.name}.log")
        self._ask("open", self.pool.code, self.pool.memory_mb, self.pool.start_s, str(log or ""))
        self._open = True

    def _done(self, call: PoolCall) -> Any:
        if self.lost:
            raise WorkerError(ENDED, f"no node with workers is left: {self.lost}. Start the run again, on other nodes")
        return self._ask("do", call.method, call.arguments, call.timeout_s, limit_s=call.timeout_s)

    def _ask(self, method: str, *arguments: Any, limit_s: float = 0.0) -> Any:
        """Ask the node, and wait for its answer; where it is lost, so is this. Raises WorkerError."""
        try:
            silence_s = max(limit_s, timeouts.WORKER_SILENT_S) if limit_s else math.inf
            limit_s += self.pool.start_s + timeouts.AGENT_S  # a process may be starting there
            answer = self._node.ask(method, self._key, packed(arguments), limit_s)
            while not wait([answer], timeouts.WORKER_LOOK_S).done:
                if self.pool.closed:
                    raise WorkerError(ENDED, "the pool of workers was closed")
                if why := self._node.absence(silence_s):
                    raise RunError(why)
            self.life, value, kind, said = json.loads(answer.result())
        except (TypeError, ValueError, RecursionError, WireError) as error:  # arguments that cannot be sent
            raise WorkerError(RAISED, f"{method}: {error}") from error
        except RunError as error:
            self.lost, self.life = f"{self._node.name} and its workers are lost: {error}", self.life + 1
            self._node.lose(str(error))
            with self.pool.changed:
                self.pool.changed.notify_all()
            raise WorkerError(GONE, self.lost) from error
        if kind:
            raise WorkerError(kind, said)
        return value

    def ask_stack(self) -> None:
        with suppress(RunError):
            self._stack_there = self._node.ask("stack", self._key, "[]", timeouts.AGENT_S)

    def stack_text(self) -> str:
        there = self._stack_there
        return there.result() if there.done() and not there.exception() else ""

    def _end(self) -> None:
        with suppress(RunError):
            if self._open and not self.lost:
                self._node.ask("close", self._key, "[]", timeouts.WORKER_END_S)


class HostedWorkers:
    """Has each worker in a pool of one, which keeps deadlines and the limit of memory, and replaces its process.

    Any thread may call it. A worker's `key` is its name. Answers are JSON: how many processes of the worker have ended,
    the value, and the kind and text of its WorkerError; these are empty where it is none.
    """

    def __init__(self) -> None:
        self._pools: dict[str, WorkerPool] = {}

    def open(self, key: str, code: tuple[str, str, dict[str, Any]], memory_mb: int, start_s: float, log: str) -> str:
        """Start a worker, in place of an earlier one, and wait until it has loaded its code; `log` may be empty."""
        self.close(key)
        self._pools[key] = pool = WorkerPool(Code(*code), 1, memory_mb, start_s, Path(log) if log else None)
        return _answer(pool, pool.ready)

    def do(self, key: str, method: str, arguments: list[Any], timeout_s: float) -> str:
        """Have a worker call a method of its object, and wait for that."""
        pool = self._pools[key]
        return _answer(pool, lambda: pool.submit(method, *arguments, timeout_s=timeout_s).result())

    def stack(self, key: str) -> str:
        """Return where a worker is that does a call, as `WorkerPool.stack_texts`; no JSON."""
        return "".join(self._pools[key].stack_texts())

    def close(self, *keys: str) -> str:
        """End workers, all of them if none is named, and wait for them."""
        for key in keys or list(self._pools):
            if (pool := self._pools.pop(key, None)) is not None:
                pool.close()
        return ""


def _answer(pool: WorkerPool, work: Callable[[], Any]) -> str:
    try:
        said = [work(), "", ""]
    except WorkerError as error:
        said = [None, error.kind, str(error)]
    except CancelledError:
        said = [None, ENDED, "the pool of workers was closed"]
    return json.dumps([pool.ended, *said])
