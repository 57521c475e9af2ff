"""How a run under mpirun ends that cannot go on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from training_runs import MPIRUN, mpirun, started, train

pytestmark = [pytest.mark.mpi, pytest.mark.engine, pytest.mark.slow]

SMALL = (
    *("--algo.advantage.estimator=group_norm", "--algo.kl.init_coef=0", "--eval.dataset="),
    *("--train.max_steps=1000", "--train.num_episodes=1000"),
)
"""An actor rank and an engine."""


def test_the_rank_that_is_gone_is_named_and_usr1_saves(config: Path) -> None:
    run_dir = config.parent / "killed"
    with started(config, run_dir, *SMALL, command=mpirun(2)) as run:
        run.wait_for_step(1)
        os.kill(run.process.pid, signal.SIGUSR1)  # mpirun passes it on
        code, output = run.wait()
    assert code == 0, output
    saved = json.loads((run_dir / "summary.json").read_text())
    assert saved["status"] == "stopped"
    with started(config, run_dir, *SMALL, command=mpirun(2)) as run:
        run.wait_for_step(saved["steps"] + 1)
        os.kill(run.worker("actor"), signal.SIGKILL)
        code, output = run.wait()
    assert "resuming from" in output
    assert code == 1, output
    assert "error: role actor died: its process group on" in output
    assert "was killed by SIGKILL" in output
    assert "the run is not restarted in this job: under MPI no role can be started again: a rank that is gone" in output


@pytest.mark.parametrize(
    ("ranks", "override", "said"),
    [
        (5, "--train.seed=1", "mpirun started 5 processes, but the roles have 4 ranks"),
        (4, "--train.colocate_actor_ref=true", "does not work with mpirun"),
        (4, "--train.seeed=1", "did you mean --train.seed?"),
    ],
)
def test_a_users_mistake_is_said_once_and_starts_nothing(
    config: Path, tmp_path: Path, ranks: int, override: str, said: str
) -> None:
    code, output = train(config, tmp_path / "run", override, command=mpirun(ranks))
    assert code == 2
    assert output.count(said) == 1
    assert "Traceback" not in output
    assert not (tmp_path / "run" / "logs").exists()


def test_dry_run_shows_the_ranks_of_comm_world(config: Path, tmp_path: Path) -> None:
    code, output = train(config, tmp_path / "run", "--dry_run", command=mpirun(4))
    assert code == 0
    assert output.count("# A actor: 1 rank on 1 node") == 1


def test_the_launcher_is_the_environments_own() -> None:
    assert "Open MPI" in subprocess.run([MPIRUN, "--version"], capture_output=True, text=True, check=True).stdout
