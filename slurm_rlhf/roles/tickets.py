"""Which call a finished response goes back with."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from slurm_rlhf.control.request import Request


@dataclass(slots=True)
class _Stream:
    """Calls of one stream in their order, and what is finished and not yet answered."""

    open: deque[tuple[Request, int]] = field(default_factory=deque)  # call, responses that it asked for
    finished: list[Any] = field(default_factory=list)


class Tickets:
    """A call asks for a number of responses and is answered with as many, of its stream, whichever finish first.

    So the caller knows how much an engine has in hand: of a call that were answered with its own responses only, the
    last one would hold back the news that the others' places are free. All responses of a stream are answered when as
    many have finished as its calls asked for.
    """

    def __init__(self) -> None:
        self._streams: dict[int, _Stream] = {}

    def open(self, stream: int, request: Request, count: int) -> None:
        """`request` waits for `count` responses, at least 1."""
        self._streams.setdefault(stream, _Stream()).open.append((request, count))

    def finish(self, stream: int, response: Any) -> tuple[Request, list[Any]] | None:
        """A response is finished: the call that it completes, if it does, and what to answer it with."""
        queue = self._streams[stream]
        queue.finished.append(response)
        request, count = queue.open[0]
        if len(queue.finished) < count:
            return None
        queue.open.popleft()
        found, queue.finished = queue.finished, []
        if not queue.open:
            del self._streams[stream]
        return request, found

    def fail(self, error: Exception) -> None:
        """Nothing that was asked for will come."""
        for queue in self._streams.values():
            for request, _ in queue.open:
                request.fail(error)
        self._streams.clear()
