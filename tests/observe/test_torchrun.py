"""Who failed first, in torchrun's own report: made by a real torchrun."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from slurm_rlhf.observe.log_tail import FailedProcess, first_failure

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
RANK = """
import os, signal, time
print("pid", os.environ["RANK"], os.getpid(), flush=True)
if os.environ["RANK"] == "1":
    END
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("end", "exitcode", "how"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", -9, "was killed by SIGKILL (often: the node's or the job's memory"),
        ("raise SystemExit(3)", 3, "ended with status 3"),
    ],
)
def test_the_rank_that_failed_first_is_found(tmp_path: Path, end: str, exitcode: int, how: str) -> None:
    script, log = tmp_path / "rank.py", tmp_path / "actor.n1.torchrun.log"
    script.write_text(RANK.replace("END", end))
    log.write_text("of an earlier start\n")
    mark = log.stat().st_size
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    with log.open("a") as out:
        subprocess.run(command, stdout=out, stderr=out, stdin=subprocess.DEVNULL, timeout=100, check=False)
    pids = dict(line.split()[1:] for line in log.read_text().splitlines() if line.startswith("pid "))
    found = first_failure(log, mark)
    assert found == FailedProcess(1, int(pids["1"]), exitcode)
    assert found.how.startswith(how)
    assert first_failure(log, log.stat().st_size) is None  # nothing of an earlier start
    assert first_failure(tmp_path / "none.log") is None
