"""The processes of a pool of workers, and servers of this process whose answers a pool gives."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import reduce
from http.server import ThreadingHTTPServer
from typing import Any

import pytest
from waiting import HANG_S

from slurm_rlhf.workers.pool import WorkerPool


def pids_of(pool: Any) -> list[int]:
    """List the processes of the workers that run here."""
    return [worker.process.pid for worker in pool._workers if worker.process is not None]


@contextmanager
def listening(server: ThreadingHTTPServer, pool: WorkerPool | None = None) -> Iterator[None]:
    """Serve in a thread, once the pool behind the server is ready; both end with the block."""
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        if pool:
            pool.ready()
        yield
    finally:
        server.shutdown()
        thread.join(HANG_S)
        server.server_close()
        if pool:
            pool.close()


GO_WRONG: list[Any] = [
    pytest.param("hang", (), "late", "hang did not return within", True, marks=pytest.mark.slow),
    ("crash", (), "ended", "its process was killed by SIGSEGV", True),
    ("leave", (7,), "ended", "its process ended with status 7", True),
    pytest.param("grow", (), "memory", "its process grew past 400 MiB", True, marks=pytest.mark.slow),
    ("fail", ("x",), "raised", "KeyError: 'x'", False),
    ("stop", (), "raised", "SystemExit: 3", False),
    ("garbage", (), "raised", "a value of type object cannot go to another process", False),
    ("double", (reduce(lambda inner, _: [inner], range(5000), 1),), "raised", "recursion depth exceeded", False),
    ("double", (object(),), "raised", "a value of type object cannot go to another process", False),
    ("nothing", (), "raised", "has no attribute 'nothing'", False),
]
"""Calls of `served.Served`: method, arguments, kind and text of the error, and whether the process ends."""
