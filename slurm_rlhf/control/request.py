"""A call as the rank sees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from slurm_rlhf.control import failure
from slurm_rlhf.control.codec import Buffer, encode
from slurm_rlhf.errors import RunError

Send = Callable[[str, list[Buffer], int], None]


@dataclass(slots=True)
class Request:
    """One call of the conductor; answer it once, from any thread, at any time."""

    method: str
    args: dict[str, Any]
    id: int
    send: Send = field(repr=False)
    """(kind, body frames, id) into the client's outbox."""
    answered: bool = False
    failed: bool = False  # and answered so

    def reply(self, result: Any = None) -> None:
        """Does not block; arrays of `result` may change as soon as this returns.

        Raises WireError when `result` cannot be encoded; the request is then still open, for `fail`.
        """
        self._answer("reply", encode(result))

    def fail(self, error: BaseException) -> None:
        """The caller's Future raises RemoteError with the name, message and traceback of `error`."""
        self.failed = True
        self._answer("error", encode(failure.to_wire(error)))

    def _answer(self, kind: str, frames: list[Buffer]) -> None:
        if self.answered:
            raise RunError(f"{self.method} (call {self.id}) has been answered already")
        self.answered = True
        self.send(kind, frames, self.id)
