"""Notice a preemption: Slurm sends SIGTERM to all ranks of a job, and none to the script."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterable

from slurm_rlhf.wire import timeouts
from slurm_rlhf.wire.messages import Peer

log = logging.getLogger(__name__)


class Preemption:
    """Sends SIGUSR1 to this process when all ranks of a role got SIGTERM: save, and go on later.

    One rank alone was not preempted: somebody has sent it the signal. Used by one thread.
    """

    def __init__(self) -> None:
        self._told: set[Peer] = set()
        self._noticed = False

    def note(self, peer: Peer, ranks: Iterable[Peer], count: int) -> None:
        """Note that `peer` got SIGTERM; `ranks`: those of its role now, of which `count` have to get it."""
        log.info("%s was told to terminate", peer)
        self._told.add(peer)
        if not self._noticed and sum(each in self._told for each in ranks) == count:
            self._noticed = True
            threading.Timer(timeouts.PREEMPTION_S, os.kill, (os.getpid(), signal.SIGUSR1)).start()
