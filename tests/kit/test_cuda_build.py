"""The stand-ins for GPUs against a CUDA build of torch, whose bindings of NCCL can be read without a GPU.

bash sbatch/environment.sh --gpu          # in another checkout: 9 GB
SLURM_RLHF_CUDA_PYTHON=OTHER/.venv/bin/python bash tests/run.sh -m full tests/kit/test_cuda_build.py
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from waiting import HANG_S

VARIABLE = "SLURM_RLHF_CUDA_PYTHON"
TESTS = Path(__file__).parents[1]
SUPPORT = TESTS / "support"
UNNAMED = {"perform_nocolor_split", "register_mem_pool", "deregister_mem_pool"}
"""Methods that the stub describes otherwise than torch 2.13.0 binds them. Nothing here calls them."""

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        VARIABLE not in os.environ, reason=f"needs a network: {VARIABLE} names no Python of a CUDA build"
    ),
]


def inside(*words: str) -> subprocess.CompletedProcess[str]:
    """The CUDA build's Python, without a GPU."""
    return subprocess.run(
        [os.environ[VARIABLE], *words],
        env={**os.environ, "PYTHONPATH": f"{TESTS.parent}{os.pathsep}{SUPPORT}", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
        cwd=TESTS.parent,
    )


def test_the_bindings_of_nccl_take_what_the_stand_ins_take() -> None:
    done = inside(str(SUPPORT / "kit_cuda_build.py"))
    assert done.returncode == 0, done.stderr[-3000:]
    answer = json.loads(done.stdout)
    assert answer["cuda"], "that Python has no CUDA build of torch"
    assert {line.partition(":")[0] for line in answer["differences"]} <= UNNAMED, answer["differences"]


def test_the_stand_ins_pass_their_own_tests_there() -> None:
    """And, where there are tests of the transfers with them, those."""
    files = [str(TESTS / "gpu" / name) for name in ("test_standins.py", "test_sync.py")]
    done = inside("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not full", *files)
    assert done.returncode == 0, done.stdout[-5000:]
    assert " passed" in done.stdout


def test_the_version_of_cuda_is_read_without_importing_torch() -> None:
    script = (
        "import sys; from slurm_rlhf.nodes.node_look import cuda_build; print(cuda_build(), 'torch' in sys.modules)"
    )
    done = inside("-c", script)
    assert done.stdout.split() == ["13.0", "False"], done.stderr[-2000:]
