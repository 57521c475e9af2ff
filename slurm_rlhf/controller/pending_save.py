"""A checkpoint that is being written while the run goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from slurm_rlhf.control.server import RoleHandle


@dataclass(slots=True)
class PendingSave:
    """Waits in a thread of its own until a checkpoint of `step` is whole."""

    step: int
    started: float  # time.monotonic()
    cost_s: float  # for which the run waited
    _seconds: Future[float] = field(default_factory=Future, init=False)

    def begin(self, complete: Callable[[], None]) -> None:
        """Run `complete`, after which the checkpoint is whole, beside the run."""
        threading.Thread(target=self._run, args=(complete,), name="checkpoint", daemon=True).start()

    def complete(self, complete: Callable[[], None]) -> None:
        """Run `complete` now; the run waits for it. Raises what it raises."""
        complete()
        self.cost_s = time.monotonic() - self.started
        self._seconds.set_result(self.cost_s)

    def _run(self, complete: Callable[[], None]) -> None:
        try:
            complete()
        except BaseException as error:  # `result` raises it in the main thread
            self._seconds.set_exception(error)
        else:
            self._seconds.set_result(time.monotonic() - self.started)

    def done(self) -> bool:
        """Tell whether `result` need not wait."""
        return self._seconds.done()

    def wait_for(self, timeout_s: float | None) -> bool:
        """Wait until it is written or has failed, no longer than so many seconds if any; tell whether it is over."""
        try:
            self._seconds.exception(timeout_s)
        except TimeoutError:
            return False
        return True

    def result(self) -> float:
        """Wait, and return the seconds from its beginning until it was whole. Raises what went wrong."""
        return self._seconds.result()


def written(roles: Iterable[RoleHandle[Any]]) -> list[Future[None]]:
    """Return what is done once each rank of `roles` has written what `save_async` has begun."""
    return [role.written(rank) for role in roles for rank in range(role.world)]
