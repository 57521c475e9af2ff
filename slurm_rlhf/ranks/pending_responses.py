"""Finished responses on their way back: which call each of them answers."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field

from slurm_rlhf.errors import RunError
from slurm_rlhf.wire.calls import GenerateAnswer, Sampled

Answer = Future[GenerateAnswer]
"""Of a call."""


@dataclass(slots=True)
class _Stream:
    """Keeps the calls of one stream in their order, and what is finished and not yet answered."""

    open: deque[tuple[Answer, int]] = field(default_factory=deque)  # call, responses that it asked for
    finished: list[Sampled] = field(default_factory=list)
    owed: int = 0  # responses that were asked for and that no call has come for yet


class PendingResponses:
    """Answers each call of a stream with as many responses as it asked for, whichever finish first.

    So the caller knows how much an engine has in hand: of a call that were answered with its own responses only, the
    last one would hold back the news that the others' places are free. All responses of a stream are answered when as
    many have finished as its calls asked for. A call may ask for more responses than it is answered with: then calls
    that ask for none come for the rest.
    """

    def __init__(self) -> None:
        self._streams: dict[int, _Stream] = {}

    def open(self, stream: int, answer: Answer, count: int, asked: int | None = None) -> list[Sampled] | None:
        """Let `answer` wait for `count` responses, at least 1; `asked`: how many its call asks for, None: as many.

        Returns what to answer it with, if that has finished already. Raises RunError for a call that comes for
        responses which nobody has asked for, or which a failure has taken away.
        """
        queue = self._streams.get(stream, _Stream())
        owed = queue.owed + (count if asked is None else asked) - count
        if owed < 0:
            raise RunError(f"a call came for {count} responses of stream {stream}, and {queue.owed} are left for it")
        self._streams[stream] = queue
        queue.owed = owed
        queue.open.append((answer, count))
        return self._complete(stream)

    def finish(self, stream: int, response: Sampled) -> tuple[Answer, list[Sampled]] | None:
        """Add a finished response; return the call that it completes, if any, and what to answer it with."""
        queue = self._streams[stream]
        queue.finished.append(response)
        first = queue.open[0][0] if queue.open else None
        found = self._complete(stream)
        return None if first is None or found is None else (first, found)

    def _complete(self, stream: int) -> list[Sampled] | None:
        """Take the answer to the first call of the stream, if as many responses have finished."""
        queue = self._streams[stream]
        if not queue.open or len(queue.finished) < queue.open[0][1]:
            return None
        _, count = queue.open.popleft()
        found, queue.finished = queue.finished[:count], queue.finished[count:]
        if not queue.open and not queue.owed:
            del self._streams[stream]
        return found

    def fail(self, error: Exception) -> None:
        """Let all calls fail: nothing that they asked for will come."""
        for queue in self._streams.values():
            for answer, _ in queue.open:
                answer.set_exception(error)
        self._streams.clear()
