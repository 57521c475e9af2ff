"""How large the buckets of weights are."""

from __future__ import annotations

_DEFAULT_MB = {False: 64, True: 256}


def bucket_mb(asked: int, on_gpus: bool) -> int:
    """MiB of a bucket for sync.bucket_mb = `asked`; for 0 256 between GPUs, where small ones cost launches and waits,
    and 64 through CPUs."""
    return asked or _DEFAULT_MB[on_gpus]
