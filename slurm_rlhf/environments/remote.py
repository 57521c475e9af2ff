"""Stands for a pool of workers whose processes are on servers of `slurm-rlhf serve-env`."""

from __future__ import annotations

import asyncio
import secrets
from concurrent.futures import Future
from typing import Any

from slurm_rlhf.errors import WorkerError
from slurm_rlhf.workers.http_client import Servers
from slurm_rlhf.workers.pool import ENDED


class RemotePool:
    """Has the part of `WorkerPool` that episodes need. A call waits while no server answers."""

    def __init__(self, servers: Servers) -> None:
        self.servers = servers

    def ready(self) -> None:
        """Return at once: the first call waits."""

    def submit(self, method: str, *arguments: Any, timeout_s: float) -> Future[Any]:
        """Have any server call a method. The future raises WorkerError."""
        return RemoteLease(self.servers).submit(method, "", *arguments, timeout_s=timeout_s)

    def lease(self) -> RemoteLease:
        """Begin something that lives on one server over several calls."""
        return RemoteLease(self.servers)

    def close(self) -> None:
        """Close the connections."""
        self.servers.close()


class RemoteLease:
    """Calls the server that has answered `begin`; then every call raises WorkerError of kind `gone` if it is away."""

    def __init__(self, servers: Servers) -> None:
        self._servers, self._server, self._episode = servers, "", secrets.token_hex(16)

    async def call(self, method: str, number: Any, *arguments: Any, timeout_s: float) -> Any:
        """As `Lease.call`; the server has numbers of its own."""
        return await asyncio.wrap_future(self.submit(method, number, *arguments, timeout_s=timeout_s))

    def submit(self, method: str, number: Any, *arguments: Any, timeout_s: float) -> Future[Any]:
        """As `Lease.submit`."""
        if method == "drop" and not self._server:  # it is over, or never began
            over: Future[Any] = Future()
            over.set_result(None)
            return over
        body = {"method": method, "episode": self._episode, "arguments": arguments, "timeout_s": timeout_s}
        try:
            return self._servers.requests.submit(self._ask, body)
        except RuntimeError as error:  # its threads have ended
            raise WorkerError(ENDED, "the connections to the servers were closed") from error

    def end(self) -> None:
        """Return: the server has forgotten the episode by itself."""

    def _ask(self, body: dict[str, Any]) -> Any:
        server, self._server = self._server, ""
        server, answer = self._servers.ask(body, server)
        if body["method"] in ("begin", "turn"):
            self._server = server
        return answer["value"]
