"""An engine's default process group, and the shared memory through which its TP ranks talk on a CPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch import distributed as dist

from slurm_rlhf.rollout.engine_place import EnginePlace

SHARED_MEMORY = Path("/dev/shm")
LOOPBACK = "lo"


def engine_store(place: EnginePlace, timeout_s: float) -> dist.Store:
    """The keys of one engine in the store that torchrun holds for its workers.

    Raises torch's DistStoreError when it cannot be reached within `timeout_s`.
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
    """Form the default group of this engine alone; vLLM makes its own groups out of it inside the block.

    What vLLM reads of torchrun's environment then speaks of the engine and not of the role. An engine lives on one
    node, so gloo listens on loopback only.
    """
    from vllm.platforms import current_platform

    os.environ |= {"RANK": str(place.tp_rank), "WORLD_SIZE": str(place.tp), "LOCAL_RANK": str(place.tp_rank)}
    others = os.environ.get("GLOO_SOCKET_IFNAME")
    os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK
    try:
        dist.init_process_group(
            current_platform.dist_backend,
            store=dist.PrefixStore("world", store),
            rank=place.tp_rank,
            world_size=place.tp,
            timeout=timedelta(seconds=timeout_s),
        )
        yield
    finally:
        if others is None:
            del os.environ["GLOO_SOCKET_IFNAME"]
        else:
            os.environ["GLOO_SOCKET_IFNAME"] = others


def unlink_segments(prefix: str) -> list[str]:
    """Remove the names of this user's shared memory that begin with `prefix`; whoever has it mapped keeps it."""
    removed = []
    for path in SHARED_MEMORY.glob(f"{prefix}*") if SHARED_MEMORY.is_dir() else ():
        with suppress(OSError):
            path.unlink()
            removed.append(path.name)
    return removed


def tp_executor(identity: str) -> Any:
    """vLLM's executor for TP ranks that were started by somebody else, made fit for several engines on a node.

    `identity` names the engine's shared memory, which vLLM otherwise names after the TP ranks alone: two engines that
    start on one node then take each other's, and what a killed one left keeps all later ones from starting. The names
    are removed as soon as every rank has opened it, so that nothing stays behind, however the engine ends.
    `before_batch`, once it is set, sees each scheduler output before the model runs on it.
    """
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    class TpExecutor(ExecutorWithExternalLauncher):
        before_batch: Any = None

        def _init_executor(self) -> None:
            super()._init_executor()
            unlink_segments(identity)

        def _distributed_args(self) -> tuple[str, int, int]:
            _, rank, local_rank = super()._distributed_args()
            return f"env://:{identity}", rank, local_rank

        def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
            if self.before_batch is not None:
                self.before_batch(scheduler_output)
            return super().execute_model(scheduler_output, non_block)

    return TpExecutor
