"""Stands for a lease of a worker whose process is on a server of `slurm-rlhf serve-env`."""

from __future__ import annotations

import secrets
from concurrent.futures import Future
from typing import Any

from slurm_rlhf.errors import WorkerError
from slurm_rlhf.workers.http_client import Servers
from slurm_rlhf.workers.pool import ENDED


class RemoteLease:
    """Calls the server that has answered `begin`; then every call raises WorkerError of kind `gone` if it is away.

    Before, a call waits while no server answers.
    """

    def __init__(self, servers: Servers) -> None:
        self._servers, self._server, self._episode = servers, "", secrets.token_hex(16)

    def submit(self, method: str, *arguments: Any, timeout_s: float) -> Future[Any]:
        """As `Lease.submit`; the server has numbers of its own."""
        if method == "drop" and not self._server:  # it is over, or never began
            over: Future[Any] = Future()
            over.set_result(None)
            return over
        body = {"method": method, "episode": self._episode, "arguments": arguments[1:], "timeout_s": timeout_s}
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
