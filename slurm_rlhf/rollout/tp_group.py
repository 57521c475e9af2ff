"""The TP ranks of an engine: their places, their process group, and the shared memory through which they talk."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from torch import distributed as dist

from slurm_rlhf.rollout._vllm import process_group_backend

SHARED_MEMORY = Path("/dev/shm")
LOOPBACK = "lo"


@dataclass(frozen=True, slots=True)
class EnginePlace:
    """Says which part of which engine a rollout rank is.

    Engine e of size `tp` consists of the rollout ranks e * tp .. e * tp + tp - 1, all of them on one node.
    """

    engine: int
    tp_rank: int  # 0: the leader, the only one that the conductor calls
    tp: int
    node: str

    @classmethod
    def of(cls, rank: int, tp: int, node: str) -> EnginePlace:
        """Return the place of rollout rank `rank`."""
        return cls(rank // tp, rank % tp, tp, node)

    @property
    def followers(self) -> set[int]:
        """Return the TP ranks of all but the leader."""
        return set(range(1, self.tp))

    def rank(self, tp_rank: int) -> int:
        """Return the rollout rank that has TP rank `tp_rank` of this engine."""
        return self.engine * self.tp + tp_rank

    def __str__(self) -> str:
        ranks = f"{self.rank(0)} to {self.rank(self.tp - 1)}" if self.tp > 1 else str(self.rank(0))
        return f"engine {self.engine} (rollout rank{'s' if self.tp > 1 else ''} {ranks} on {self.node})"


def engine_store(place: EnginePlace, timeout_s: float) -> dist.Store:
    """Connect to torchrun's store, and return the part of it that belongs to one engine.

    Raises torch's DistStoreError if it cannot be reached within `timeout_s`.
    """
    server = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
    )
    run, attempt = os.environ.get("TORCHELASTIC_RUN_ID", ""), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"slurm_rlhf/{run}/{attempt}/engine{place.engine}", server)


@contextmanager
def engine_group(place: EnginePlace, store: dist.Store, timeout_s: float) -> Iterator[None]:
    """Form the default process group of this engine; vLLM makes its own groups from it inside the block.

    What vLLM reads of torchrun's environment then describes the engine and not the role. An engine is on one node, so
    gloo listens on loopback only.
    """
    os.environ |= {"RANK": str(place.tp_rank), "WORLD_SIZE": str(place.tp), "LOCAL_RANK": str(place.tp_rank)}
    outer = os.environ.get("GLOO_SOCKET_IFNAME")
    os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK
    try:
        dist.init_process_group(
            process_group_backend(),
            store=dist.PrefixStore("world", store),
            rank=place.tp_rank,
            world_size=place.tp,
            timeout=timedelta(seconds=timeout_s),
        )
        yield
    finally:
        del os.environ["GLOO_SOCKET_IFNAME"]
        if outer is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = outer


def unlink_segments(prefix: str) -> list[str]:
    """Remove this user's shared memory whose names begin with `prefix`; a process that has it mapped keeps it."""
    removed = []
    for path in SHARED_MEMORY.glob(f"{prefix}*") if SHARED_MEMORY.is_dir() else ():
        with suppress(OSError):
            path.unlink()
            removed.append(path.name)
    return removed
