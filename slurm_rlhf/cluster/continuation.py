"""How a run that had to stop goes on by itself: the seam between the conductor and a scheduler."""

from __future__ import annotations

from typing import Protocol


class Continuation(Protocol):
    """What a scheduler offers to a job that is not done."""

    def end_time(self) -> float | None:
        """When the allocation ends, in seconds since the epoch; None when nobody knows. Asks the scheduler once."""

    def go_on(self) -> str:
        """Arrange that the same job runs again; says what was arranged, or why nothing could be.

        The scheduler may end this process before it returns, so everything has to be on disk by now.
        """

    def finished(self) -> str:
        """The run is done: call off what was arranged to go on with it; says what, empty if there was nothing."""


class NoContinuation:
    """Nobody runs the job again but the user."""

    def end_time(self) -> float | None:
        return None

    def go_on(self) -> str:
        return "the same command goes on from here"

    def finished(self) -> str:
        return ""
