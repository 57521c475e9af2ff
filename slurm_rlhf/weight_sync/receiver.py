"""The engine's end: buckets as they come in, checked, as (name, tensor) pairs for the engine to load."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from slurm_rlhf.errors import SyncError
from slurm_rlhf.weight_sync.backends.backend import Incoming
from slurm_rlhf.weight_sync.backends.table import carrier_of
from slurm_rlhf.weight_sync.bucket import Assembly
from slurm_rlhf.weight_sync.buffers import Pool
from slurm_rlhf.weight_sync.compare import samples_of
from slurm_rlhf.weight_sync.compatibility import check_match
from slurm_rlhf.weight_sync.group import SyncGroup
from slurm_rlhf.weight_sync.plan import SyncPlan
from slurm_rlhf.weight_sync.update import following


class Receiver:
    """An engine rank of a group."""

    def __init__(
        self, group: SyncGroup, plan: SyncPlan, expected: Sequence[Sequence[Any]] | None = None, compare: int = 0
    ) -> None:
        """`expected`: [[name, shape, dtype], ...] that this end is able to load; `compare` as `Sender`'s.

        Raises SyncError when both ends differ in a name, a shape or a dtype; the other members get to know.
        """
        self.group = group
        self.plan = plan
        self.verify_s = 0.0  # seconds of the last update that went into checksums and into putting parameters together
        self._compare = compare
        try:
            if expected is not None:
                check_match(plan.described, expected, str(group.members[0]), str(group.me))
            group.agree(plan.fingerprint())
        except SyncError as error:
            group.refuse(str(error))
            raise
        self.carrier = carrier_of(group, plan)
        self._stream = plan.stream_to(group.rank)
        self.pool = Pool(self.carrier.device)  # of parameters that are put together

    @contextmanager
    def update(self, version: int) -> Iterator[Iterator[tuple[str, torch.Tensor]]]:
        """The parameters of policy `version`, in layer order, as they arrive:

            with receiver.update(version) as weights:
                engine.load_weights(weights, version)

        The block's end tells rank 0 that they are loaded. The tensors lie on the carrier's device, in memory that is
        not used again as long as one of them lives: an engine may keep them. Raises SyncError naming the parameters
        whose checksum differs, or who broke the update; whatever the block raises, the sender gets to know.
        """
        with following(self.group, version):
            weights = self._weights(version)
            yield weights
            left_over = sum(1 for _ in weights)
            if left_over:
                raise SyncError(f"the engine left {left_over} of the {len(self.plan.parameters)} parameters unread")
            self.carrier.flush()

    def _weights(self, version: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Further buckets are on their way while the engine loads one; the last slot is left to slower neighbours."""
        assembly = Assembly(self.plan, self.pool)
        self.verify_s = 0.0
        samples = samples_of(self.group, self.plan, self._stream, version, self._compare)
        buckets = len(self.plan.buckets)
        ahead: deque[Incoming] = deque()
        asked = 0
        for bucket in range(buckets):
            while asked < min(bucket + self.plan.depth - 1, buckets):
                ahead.append(self.carrier.receive(asked))
                asked += 1
            incoming = ahead.popleft()
            buffer = incoming.wait()
            parts = self.plan.parts(bucket, self._stream)
            found = (assembly.copies if incoming.lent else assembly.parameters)(buffer, parts, bucket, version)
            del buffer
            while True:
                started = time.monotonic()
                name, tensor = next(found, ("", None))
                self.verify_s += time.monotonic() - started
                if tensor is None:
                    break
                yield name, tensor
                if name in samples:  # as the engine had it, put together and loaded
                    samples[name].check(tensor, version)
                del tensor
            del found
            incoming.release()
