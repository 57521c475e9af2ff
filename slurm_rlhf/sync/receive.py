"""The engine's end: buckets as they come in, checked, as (name, tensor) pairs for the engine to load."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from slurm_rlhf.errors import SyncError
from slurm_rlhf.sync.bucket import verify, view
from slurm_rlhf.sync.group import SyncGroup
from slurm_rlhf.sync.plan import SyncPlan, check_match
from slurm_rlhf.sync.push import REPORT_BYTES, REPORT_TAG
from slurm_rlhf.sync.store import read
from slurm_rlhf.sync.transport import Pending, TransportFailure


class Receiver:
    """Any rank of a group but 0."""

    def __init__(self, group: SyncGroup, expected: Sequence[Sequence[Any]] | None = None) -> None:
        """Take over the sender's plan. `expected`: [[name, shape, dtype], ...] that this end is able to load.

        Raises SyncError when both ends differ in a name or a shape; the sender gets to know.
        """
        self.group = group
        self._lost: TransportFailure | None = None
        group.wait_for(lambda: group.store.check(["plan"]), f"the plan of {group.members[0]}")
        self.plan = SyncPlan.from_wire(json.loads(read(group.store, "plan") or ""))
        if expected is not None:
            try:
                check_match(self.plan.described, expected, str(group.members[0]), str(group.me))
            except SyncError as error:
                self._refuse(str(error))
                raise

    @contextmanager
    def update(self, version: int) -> Iterator[Iterator[tuple[str, torch.Tensor]]]:
        """The parameters of policy `version`, in the sender's order, as they arrive:

            with receiver.update(version) as weights:
                engine.load_weights(weights, version)

        The block's end tells the sender that they are loaded. The tensors lie on the transport's device and share the
        memory of their bucket, which is never reused: an engine may keep them. Raises SyncError naming the parameters
        whose checksum differs, or who broke the update; whatever the block raises, the sender gets to know.
        """
        self.group.check()
        weights = self._weights(version)
        try:
            yield weights
            left_over = sum(1 for _ in weights)
            if left_over:
                raise SyncError(f"the engine left {left_over} of the {len(self.plan.described)} parameters unread")
            done = torch.zeros(REPORT_BYTES, dtype=torch.uint8)
            self.group.control.send(done, 0, REPORT_TAG).wait()
        except BaseException as error:
            lost = error if isinstance(error, TransportFailure) else self._lost
            if lost is None:
                self._refuse(f"{type(error).__name__}: {error}")
                raise
            raise self._broken(version, lost) from lost

    def _weights(self, version: int) -> Iterator[tuple[str, torch.Tensor]]:
        """One bucket is on its way while the engine loads the one before."""
        try:
            following = self._expect(0)
            for index, bucket in enumerate(self.plan.buckets):
                buffer, pending = following
                pending.wait()
                if index + 1 < len(self.plan.buckets):
                    following = self._expect(index + 1)
                verify(buffer, bucket, index, version)
                for entry in bucket.entries:
                    yield entry.name, view(buffer, entry)
        except TransportFailure as error:
            self._lost = error  # kept, because the engine may wrap what its iterator raises
            raise

    def _expect(self, index: int) -> tuple[torch.Tensor, Pending]:
        nbytes = self.plan.buckets[index].nbytes
        # A new buffer each time: vLLM's layerwise reload holds on to tensors until their layer is complete.
        buffer = torch.empty(nbytes, dtype=torch.uint8, device=self.group.data.device)
        return buffer, self.group.data.broadcast(buffer, 0)

    def _refuse(self, reason: str) -> None:
        self.group.board.post(reason)
        self.group.abort(reason)

    def _broken(self, version: int, lost: TransportFailure) -> SyncError:
        ended = self.group.ended
        self.group.board.post(ended)
        self.group.drop()
        verdict = ended or self.group.board.verdict()
        if verdict is None:
            verdict = f"{self.group.members[0]}, which sends them, is gone or hangs: {lost}"
        self.group.abort(verdict)
        return SyncError(f"the weights of policy version {version} did not arrive at {self.group.me}: {verdict}")
