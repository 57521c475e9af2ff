"""The processes of a pool of workers, and servers of this process whose answers a pool gives."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from typing import Any

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
