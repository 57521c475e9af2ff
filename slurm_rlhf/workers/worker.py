"""What every rank of every role has in common: it answers calls by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from slurm_rlhf.config.schema import Config
from slurm_rlhf.control.client import ControlClient
from slurm_rlhf.control.request import Request
from slurm_rlhf.errors import RunError
from slurm_rlhf.workers.about import about_device


@dataclass(frozen=True, slots=True)
class Seat:
    """Who a rank is."""

    role: str
    rank: int  # within its role
    world: int  # ranks of the role
    local_rank: int  # on its node: which of the visible accelerators is its own
    node: str


class Role(ABC):
    """A worker's half of the control plane. Subclasses list their methods in `calls`."""

    def __init__(self, config: Config, seat: Seat, client: ControlClient) -> None:
        self.config = config
        self.seat = seat
        self.client = client

    @abstractmethod
    def calls(self) -> dict[str, Callable[..., Any]]:
        """Method name -> function; its keyword arguments are the call's, its result the answer."""

    def attention(self) -> str:
        """The attention kernel that this rank uses; empty: it has none, or none was used yet."""
        return ""

    def about(self) -> dict[str, Any]:
        """As `about_device`."""
        return about_device(self.attention)

    def handle(self, request: Request) -> None:
        """Answer one call. What the method raises goes to the caller, not to the end of this process."""
        try:
            method = {"about": self.about, **self.calls()}.get(request.method)
            if method is None:
                raise RunError(f"{self.seat.role} knows no call {request.method!r}; it knows {sorted(self.calls())}")
            request.reply(method(**request.args))
        except Exception as error:
            request.fail(error)

    def busy(self) -> bool:
        """True while `advance` has something to do, so that the worker must not wait for the next call."""
        return False

    def advance(self) -> None:
        """Do a small piece of work of one's own between two calls."""

    def close(self) -> None:
        """Release what outlives a process: shared memory, sockets, groups."""
