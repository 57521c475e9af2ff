"""Stop listening when all who belong in have come: torch's stores know no password, and obey whoever reaches them."""

from __future__ import annotations

import os
import threading
import time
from typing import Protocol

JOINED = "slurm_rlhf/joined"
"""Key of a store: how many ranks have connected to all that they need of it."""

_LOOK_S = 0.5


class Counter(Protocol):
    """A store that counts, as torch's do."""

    def add(self, key: str, amount: int, /) -> int:
        """Add `amount` to the number under `key`, and return the sum."""


def shut(number: int) -> None:
    """Close the listening socket of descriptor `number`; connections that it has made go on.

    Whoever holds the number, as a store does, may still close it: it is that of an empty file from now on.
    """
    nothing = os.open(os.devnull, os.O_RDONLY)
    try:
        os.dup2(nothing, number, inheritable=False)
    finally:
        os.close(nothing)


def shut_when_joined(store: Counter, number: int, ranks: int) -> None:
    """Shut descriptor `number`, at which `store` listens, when `ranks` ranks have joined. A thread waits for them."""

    def wait() -> None:
        try:
            while store.add(JOINED, 0) < ranks:
                time.sleep(_LOOK_S)
        except RuntimeError:
            return  # the store has ended
        shut(number)

    threading.Thread(target=wait, name="door", daemon=True).start()
