"""The quickstart as a newcomer runs it, on a machine that has no network at all once the environment is there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from checkout import MADE_HERE, ROOT, without_network
from programs import completed
from waiting import HANG_S

pytestmark = [pytest.mark.engine, pytest.mark.slow]

STEPS = 16
LEARNT = 0.25
"""Least rise of the evaluation in STEPS steps. 22 runs of PPO and GRPO, with four seeds and three sets of vector
instructions, rose by 0.314, with a standard deviation of 0.014; two evaluations of one model are 0.02 apart."""

# A new network namespace has its loopback interface down; `ip` need not be installed.
LOOPBACK_UP = """
import fcntl, os, socket, struct, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
    fcntl.ioctl(control, 0x8914, struct.pack("16sh14x", b"lo", 0x1 | 0x40))  # SIOCSIFFLAGS, IFF_UP | IFF_RUNNING
os.execvp(sys.argv[1], sys.argv[1:])
"""


def quickstart(run_dir: Path, prefix: list[str], *words: str) -> tuple[str, dict[str, Any]]:
    """Do STEPS steps; answer what was printed, and the summary."""
    script, keys = str(ROOT / "sbatch/quickstart.sh"), (f"--run_dir={run_dir}", f"--train.max_steps={STEPS}")
    environment = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "OMP_NUM_THREADS": "1"}
    limit_s = 2.5 * HANG_S  # a wait for all of it: minutes where nothing else runs
    command = [*prefix, "bash", script, *words, *keys]
    done = completed(command, limit_s, env=environment, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, json.loads((run_dir / "summary.json").read_text())


@pytest.mark.skipif(not MADE_HERE, reason="this environment was not made by sbatch/environment.sh")
def test_it_learns_without_a_network(tmp_path: Path) -> None:
    offline = without_network()
    prefix = [*offline, sys.executable, "-c", LOOPBACK_UP] if offline else []
    run_dir = tmp_path / "run"
    said, summary = quickstart(run_dir, prefix)
    assert "4/4 PPO" in said
    assert f"{STEPS}/{STEPS}" in said
    assert summary["status"] == "finished"
    assert summary["world"] == {"actor": 1, "critic": 1, "reference": 1, "rollout": 1}
    assert summary["eval_before"] <= 0.65
    assert summary["eval_after"] >= summary["eval_before"] + LEARNT
    report = (run_dir / "report.html").read_text()
    assert '"status":"finished"' in report
    stated = json.loads(report.partition('id="data">')[2].partition("</script>")[0])["runs"][0]
    assert stated["curves"]["steps"] == list(range(1, STEPS + 1))
    assert stated["samples_of"] == 2 * STEPS
    assert {row["role"] for row in stated["timeline"]["rows"]} == {
        "conductor",
        "actor",
        "critic",
        "reference",
        "rollout",
    }
    assert max(summary["self_check"][name] for name in ("again", "eval", "alone", "engine", "reference")) < 1e-4


@pytest.mark.full  # test_run_recipes does its first steps
@pytest.mark.skipif(not MADE_HERE, reason="this environment was not made by sbatch/environment.sh")
def test_a_recipe_learns_the_same_task(tmp_path: Path) -> None:
    said, summary = quickstart(tmp_path / "run", [], "--recipe=grpo")
    assert "4/4 grpo" in said
    assert (summary["status"], summary["world"]) == ("finished", {"actor": 1, "rollout": 1})
    assert summary["eval_after"] >= summary["eval_before"] + LEARNT
