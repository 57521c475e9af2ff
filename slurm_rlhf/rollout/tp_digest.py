"""What the TP ranks of an engine did so far, hashed as it happens, so that two ranks can compare it in 16 bytes."""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Mapping

from slurm_rlhf.rollout.request import GenerateRequest


class Ledger:
    """Each TP rank keeps one. Equal digests: same requests in the same order, same batches, same tokens."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)
        self.batches = 0
        self._version = 0

    def added(self, request: GenerateRequest) -> None:
        """A request was queued."""
        tokens = array("i", map(int, request.prompt_ids)).tobytes()
        self._note(b"a", request.key, struct.pack("<q", request.seed) + tokens)

    def planned(self, scheduled: Mapping[str, int]) -> tuple[int, bytes]:
        """A batch is about to run, `scheduled` tokens of each request: (its number, digest of all up to here)."""
        self.batches += 1
        for key, count in scheduled.items():
            self._note(b"b", key, struct.pack("<qq", self._version, count))
        return self.batches, self.digest()

    def sampled(self, key: str, tokens: list[int]) -> None:
        """A request got its next tokens."""
        self._note(b"s", key, struct.pack("<q", self._version) + array("i", tokens).tobytes())

    def loaded(self, version: int) -> None:
        """The weights became those of policy `version`.

        Not an event of its own: of an update that broke off and was repeated, one rank may have had the whole before.
        """
        self._version = version

    def digest(self) -> bytes:
        """16 bytes."""
        whole = self._hash.copy()
        whole.update(struct.pack("<q", self._version))
        return whole.digest()

    def _note(self, kind: bytes, key: str, content: bytes) -> None:
        name = key.encode()
        self._hash.update(kind + struct.pack("<II", len(name), len(content)) + name + content)
