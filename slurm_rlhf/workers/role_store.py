"""Where the ranks of a role meet when no torchrun opens the store for them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from slurm_rlhf.cluster.child_process import STORE_FD

if TYPE_CHECKING:
    from torch.distributed import TCPStore


def open_store(environ: Mapping[str, str] = os.environ) -> TCPStore | None:
    """The role's store, on the socket that this process inherited for it; None: another process has it.

    Its port was bound before anybody was told of it, so nobody else can have it.
    """
    if STORE_FD not in environ:
        return None
    from torch.distributed import TCPStore

    return TCPStore(
        environ["MASTER_ADDR"],
        int(environ["MASTER_PORT"]),
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=int(environ[STORE_FD]),
    )
