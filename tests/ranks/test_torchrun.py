"""How a torchrun of ours ends the ranks that are left when one of them ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from waiting import HANG_S, until

from slurm_rlhf.cluster.processes import running
from slurm_rlhf.observe.log_tail import first_failure

RANKS = """
import os, signal, sys, time
from pathlib import Path

place = Path(sys.argv[1])
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
if os.environ["LOCAL_RANK"] == "1":
    while not (place / "ready").exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
(place / "ready").write_text(str(os.getpid()))
signal.sigwait({signal.SIGTERM})
(place / "terminated").touch()
time.sleep(600)
"""
"""Rank 0 takes SIGTERM for a preemption, as inside a Slurm step, and goes on; rank 1 is killed."""


def test_the_others_are_killed_when_a_rank_was(tmp_path: Path) -> None:
    """By SIGTERM they would tell of a preemption, and this torchrun would wait for them for half a minute."""
    script, log = tmp_path / "ranks.py", tmp_path / "log"
    script.write_text(RANKS)
    options = ["--nnodes=1", "--nproc-per-node=2", "--rdzv-backend=bound", "--rdzv-endpoint=127.0.0.1:0"]
    options += ["--rdzv-conf=rank=0,ranks=0", "--max-restarts=0", "--monitor-interval=0.2"]
    with log.open("w") as out:
        words = [sys.executable, "-m", "slurm_rlhf.ranks.torchrun", *options, str(script), str(tmp_path)]
        code = subprocess.call(words, stdout=out, stderr=subprocess.STDOUT, timeout=HANG_S)
    assert code == 1, log.read_text()
    failed = first_failure(log)
    assert failed is not None
    assert (failed.rank, failed.exitcode) == (1, -9)
    until(lambda: not running(int((tmp_path / "ready").read_text())), "end of rank 0")
    assert not (tmp_path / "terminated").exists()
