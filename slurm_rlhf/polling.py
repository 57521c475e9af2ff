"""Wait for something that sends no message: ask whether it is there, pause, ask again."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(ready: Callable[[], object], timeout_s: float, pause_s: float = 0.005, longest_s: float = 0.1) -> bool:
    """Ask `ready()` until it is true, or `timeout_s` seconds have passed; return whether it became true.

    Pauses grow from `pause_s` to `longest_s`. What `ready` raises ends the wait.
    """
    deadline = time.monotonic() + timeout_s
    while not ready():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, longest_s)
    return True
