"""An engine of several TP ranks: their places, their process group and shared memory, and the engine itself.

Each rank schedules and samples for itself, so all must get the same calls."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch import Tensor
from torch import distributed as dist

from slurm_rlhf.config.schema import Config
from slurm_rlhf.engine._vllm import process_group_backend, tp_executor
from slurm_rlhf.engine.engine import GenerateRequest
from slurm_rlhf.engine.vllm import VllmEngine
from slurm_rlhf.process_groups._torch import environment, meet, signed, torchrun_store

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
    """Connect to torchrun's store, and return the part of it that belongs to one engine; its entries are signed.

    Raises torch's DistStoreError if it cannot be reached within `timeout_s`.
    """
    run, attempt = os.environ.get("TORCHELASTIC_RUN_ID", ""), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return signed(torchrun_store(timeout_s), f"slurm_rlhf/{run}/{attempt}/engine{place.engine}")


@contextmanager
def engine_group(place: EnginePlace, store: dist.Store, timeout_s: float) -> Iterator[None]:
    """Form the default process group of this engine, from which vLLM makes its own groups inside the block.

    From then on torchrun's variables RANK, WORLD_SIZE and LOCAL_RANK describe the engine and not the role. An engine is
    on one node, so gloo listens on loopback only.
    """
    os.environ |= {"RANK": str(place.tp_rank), "WORLD_SIZE": str(place.tp), "LOCAL_RANK": str(place.tp_rank)}
    with environment({"GLOO_SOCKET_IFNAME": LOOPBACK}):
        dist.init_process_group(
            process_group_backend(),
            store=meet(dist.PrefixStore("world", store), place.tp_rank, place.tp),
            rank=place.tp_rank,
            world_size=place.tp,
            timeout=timedelta(seconds=timeout_s),
        )
        yield


def unlink_segments(prefix: str) -> None:
    """Remove this user's shared memory whose names begin with `prefix`; a process that has it mapped keeps it."""
    for path in SHARED_MEMORY.glob(f"{prefix}*") if SHARED_MEMORY.is_dir() else ():
        with suppress(OSError):
            path.unlink()


class TpDigest:
    """Hashes what a TP rank has done so far, so that two ranks can compare it in 16 bytes.

    Equal digests: same requests in the same order, same batches, same tokens.
    """

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)
        self.batches = 0
        self._version = 0

    def added(self, request: GenerateRequest) -> None:
        """Note that a request was queued."""
        self._note("added", request.key, request.seed, *map(int, request.prompt_ids))

    def planned(self, scheduled: Mapping[str, int]) -> tuple[int, bytes]:
        """Note a batch that is about to run, `scheduled` tokens of each request; return (its number, digest so far)."""
        self.batches += 1
        self._note("planned", self._version, *scheduled.items())
        return self.batches, self.digest()

    def sampled(self, key: str, tokens: list[int]) -> None:
        """Note the next tokens of a request."""
        self._note("sampled", self._version, key, *tokens)

    def loaded(self, version: int) -> None:
        """Note that the weights are now those of policy `version`.

        It is not hashed as an event: when a failed update is repeated, some of the ranks load the version twice.
        """
        self._version = version

    def digest(self) -> bytes:
        """Return the hash, 16 bytes."""
        whole = self._hash.copy()
        whole.update(b"%d" % self._version)
        return whole.digest()

    def _note(self, *what: Any) -> None:
        self._hash.update(repr(what).encode())


class TpEngine(VllmEngine):
    """Runs one TP rank. All ranks of an engine start at the same time and call the same methods in the same order.

    Asynchronous scheduling keeps them in step: how many batches are in flight, and which one a step reads, depends on
    the calls alone and never on what the device has finished. A rank flushes inside calls that all ranks get.
    """

    def __init__(
        self,
        config: Config,
        place: EnginePlace,
        store: dist.Store,
        identity: str,
        report: Callable[[int, bytes], None],
    ) -> None:
        """Start with the engine's `store` and `identity`; `report` gets the number and digest of each batch."""
        self.place = place
        self.tp_digest = TpDigest()
        # The names are removed as soon as every rank has opened the memory, so nothing is left when the engine dies.
        self._executor = tp_executor(identity, lambda: unlink_segments(identity))
        with engine_group(place, store, config.timeout.collective):
            super().__init__(config, place.engine)
        self._core.before_each_batch(lambda scheduled: report(*self.tp_digest.planned(scheduled)))

    def add(self, request: GenerateRequest) -> None:
        super().add(request)
        self.tp_digest.added(request)

    def load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        super().load(weights, version)
        self.tp_digest.loaded(version)

    def _sampled(self, key: str, tokens: list[int]) -> None:
        self.tp_digest.sampled(key, tokens)
