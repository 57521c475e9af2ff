"""Has workers for pools on other nodes: what the agent of a node that is kept for workers does with calls of these."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

from slurm_rlhf.errors import WorkerError
from slurm_rlhf.workers.pool import ENDED, Code, WorkerPool


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
