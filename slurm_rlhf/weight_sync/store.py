"""Where the members of a group find each other: a TCPStore of its own, on a port that the system chooses."""

from __future__ import annotations

import socket
import time
from datetime import timedelta

from torch.distributed import Store, TCPStore

from slurm_rlhf.errors import SyncError

_RETRY_S = 0.1
_BACKLOG = 4096


class SyncStore:
    """The listening end, in the process of the group's rank 0. One store serves all groups that follow each other."""

    def __init__(self, server: TCPStore, host: str, port: int) -> None:
        self.host = host
        self.port = port
        self._server = server

    @classmethod
    def listen(cls, host: str, timeout_s: float) -> SyncStore:
        """Listen on the address that `host` has on this node and on no other. Raises SyncError.

        A name that means loopback here, as Debian's 127.0.1.1 for a node's own name, would be unreachable from
        elsewhere; such a store listens on all addresses.
        """
        try:
            address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][4][0]
            spelled_out = host in ("localhost", "127.0.0.1", "::1")
            if str(address).startswith("127.") and not spelled_out:
                address = ""
            family = socket.AF_INET6 if ":" in str(address) else socket.AF_INET
            listener = socket.create_server((str(address), 0), family=family, backlog=_BACKLOG)
            port = int(listener.getsockname()[1])
            server = TCPStore(
                host,
                port,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=timeout_s),
                master_listen_fd=listener.detach(),
            )
        except (OSError, RuntimeError) as error:
            raise SyncError(f"cannot listen for the engines on {host}: {error}") from error
        return cls(server, host, port)


def connect(host: str, port: int, timeout_s: float, answer_s: float) -> TCPStore:
    """A client of the store at `host:port`. Raises SyncError when it cannot be reached within `timeout_s`.

    Or when nothing answers there for `answer_s`, not even with a refusal: the store's node accepts connections however
    busy the process is.
    """
    _knock(host, port, min(answer_s, timeout_s))
    try:
        return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
    except (RuntimeError, OSError) as error:
        raise SyncError(
            f"{socket.gethostname()} cannot reach the weight sync store at {host}:{port} within {timeout_s:g} s: "
            f"{str(error).splitlines()[0]}. Is the actor alive, and can this node connect to it?"
        ) from error


def _knock(host: str, port: int, answer_s: float) -> None:
    end = time.monotonic() + answer_s
    while True:
        try:
            socket.create_connection((host, port), max(end - time.monotonic(), _RETRY_S)).close()
            return
        except ConnectionRefusedError:
            return  # an answer
        except OSError as error:
            if time.monotonic() > end:
                raise SyncError(
                    f"{socket.gethostname()} gets no answer from the weight sync store at {host}:{port} within "
                    f"{answer_s:g} s ({error.strerror or error}): the link to {host} is cut, or something drops what "
                    "is sent there"
                ) from error
        time.sleep(_RETRY_S)


def read(store: Store, key: str) -> str | None:
    """The text under `key`, None if nobody wrote it. RuntimeError when the store's process is gone."""
    return store.get(key).decode() if store.check([key]) else None
