"""`bench sync` between GPUs, on pretended ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from sync_fleet import BUCKET
from sync_peer import describe, make_weights
from waiting import HANG_S

pytestmark = [pytest.mark.slow]


BENCH_RANK = """
import json, sys
sys.path.insert(0, {tests!r})
from gpu_standins import FakeCuda
spec, rank, gpu = sys.argv[1:]
FakeCuda([gpu]).install()
from slurm_rlhf.bench import sync_rank
sync_rank.main()
"""


def test_the_benchmark_of_transfers_between_gpus(tmp_path: Path):
    spec = {"parameters": describe(make_weights(0, 2)), "actors": ["n"], "engines": ["n"], "zero": 0}
    spec |= {"bucket_bytes": BUCKET, "backend": "auto", "host": "127.0.0.1", "repeats": 1}
    spec |= {"port_file": str(tmp_path / "port"), "timeout_s": 40.0, "parent": os.getpid()}
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    code = BENCH_RANK.format(tests=str(Path(__file__).parents[1] / "support"))
    ranks = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "spec.json"), str(rank), f"GPU-{rank}"], stdout=-1)
        for rank in (0, 1)
    ]
    (found, _), _ = (rank.communicate(timeout=HANG_S) for rank in ranks)
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert {"seconds", "raw_seconds", "peak_extra_bytes"} <= set(json.loads(found))
