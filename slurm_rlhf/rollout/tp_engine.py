"""An engine of several TP ranks. Each rank schedules and samples for itself, so all must get the same calls."""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Callable, Iterable, Mapping

from torch import Tensor
from torch import distributed as dist

from slurm_rlhf.config.schema import Config
from slurm_rlhf.rollout._vllm import tp_executor
from slurm_rlhf.rollout.engine import GenerateRequest
from slurm_rlhf.rollout.tp_group import EnginePlace, engine_group, unlink_segments
from slurm_rlhf.rollout.vllm_engine import VllmEngine


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
        tokens = array("i", map(int, request.prompt_ids)).tobytes()
        self._note(b"a", request.key, struct.pack("<q", request.seed) + tokens)

    def planned(self, scheduled: Mapping[str, int]) -> tuple[int, bytes]:
        """Note a batch that is about to run, `scheduled` tokens of each request; return (its number, digest so far)."""
        self.batches += 1
        for key, count in scheduled.items():
            self._note(b"b", key, struct.pack("<qq", self._version, count))
        return self.batches, self.digest()

    def sampled(self, key: str, tokens: list[int]) -> None:
        """Note the next tokens of a request."""
        self._note(b"s", key, struct.pack("<q", self._version) + array("i", tokens).tobytes())

    def loaded(self, version: int) -> None:
        """Note that the weights are now those of policy `version`.

        Not an event of its own: when a broken update is repeated, one rank may already have loaded all of it before.
        """
        self._version = version

    def digest(self) -> bytes:
        """Return the hash, 16 bytes."""
        whole = self._hash.copy()
        whole.update(struct.pack("<q", self._version))
        return whole.digest()

    def _note(self, kind: bytes, key: str, content: bytes) -> None:
        name = key.encode()
        self._hash.update(kind + struct.pack("<II", len(name), len(content)) + name + content)


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
        self._report = report
        # The names go as soon as every rank has opened the memory: nothing stays behind, however the engine ends.
        self._executor = tp_executor(identity, lambda: unlink_segments(identity))
        with engine_group(place, store, config.timeout.collective):
            super().__init__(config, place.engine)
        self._core.before_each_batch(self._before_batch)

    def add(self, request: GenerateRequest) -> None:
        super().add(request)
        self.tp_digest.added(request)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        super().load_weights(weights, version)
        self.tp_digest.loaded(version)

    def _sampled(self, key: str, tokens: list[int]) -> None:
        self.tp_digest.sampled(key, tokens)

    def _before_batch(self, scheduled: Mapping[str, int]) -> None:
        self._report(*self.tp_digest.planned(scheduled))
