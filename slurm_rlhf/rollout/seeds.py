"""The seed of every sampling request, from what the request is and never from when it arrived."""

from __future__ import annotations

import hashlib
import struct


def request_seed(run_seed: int, prompt: int, sample: int, version: int) -> int:
    """A seed in [0, 2**63) for sample `sample` of prompt row `prompt` under policy `version`.

    blake2b over the four numbers as 64-bit integers: the same in every process, on every machine, in any order, and
    unrelated for neighbours, which sums and products of small numbers are not. The top bit stays clear because
    engines keep seeds in signed 64-bit tensors.
    """
    packed = struct.pack("<4q", run_seed, prompt, sample, version)
    digest = hashlib.blake2b(packed, digest_size=8, person=b"rlhf-request").digest()
    return int.from_bytes(digest, "little") >> 1
