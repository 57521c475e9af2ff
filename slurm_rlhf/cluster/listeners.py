"""Stop listening when all who belong in have come: torch's stores know no password, and obey whoever reaches them.

So who has come proves it with the run's secret: a stranger who counted ranks in would shut the door before the last.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import threading
import time
from collections.abc import Sequence
from typing import Protocol

JOINED = "slurm_rlhf/joined"
"""Beginning of the keys by which ranks say that they have connected to all that they need of a store."""

_LOOK_S = 0.5


class KeyStore(Protocol):
    """Keep values by their keys, as torch's stores do, for all processes that are connected."""

    def set(self, key: str, value: str, /) -> None:
        """Put `value` under `key`."""

    def get(self, key: str, /) -> bytes:
        """Return what is under `key`."""

    def check(self, keys: list[str], /) -> bool:
        """Tell whether something is under all keys."""


def tell_joined(store: KeyStore, rank: int, secret: str) -> None:
    """Say that `rank` needs no further connection to the store. Raises the store's errors."""
    store.set(_key(rank), _proof(rank, secret))


def _key(rank: int) -> str:
    return f"{JOINED}/{rank}"


def _proof(rank: int, secret: str) -> str:
    return hmac.new(secret.encode(), _key(rank).encode(), hashlib.sha256).hexdigest()


def _have_joined(store: KeyStore, ranks: Sequence[int], secret: str) -> bool:
    if not store.check([_key(rank) for rank in ranks]):
        return False
    return all(hmac.compare_digest(store.get(_key(rank)), _proof(rank, secret).encode()) for rank in ranks)


def shut(number: int) -> None:
    """Close the listening socket of descriptor `number`; connections that it has made go on.

    Whoever holds the number, as a store does, may still close it: it is that of an empty file from now on.
    """
    nothing = os.open(os.devnull, os.O_RDONLY)
    try:
        os.dup2(nothing, number, inheritable=False)
    finally:
        os.close(nothing)


def shut_when_joined(store: KeyStore, number: int, ranks: Sequence[int], secret: str) -> None:
    """Shut descriptor `number`, at which `store` listens, when all `ranks` have joined. A thread waits for them."""

    def wait() -> None:
        try:
            while not _have_joined(store, ranks, secret):
                time.sleep(_LOOK_S)
        except RuntimeError:
            return  # the store has ended
        shut(number)

    threading.Thread(target=wait, name="door", daemon=True).start()
