"""Starting the processes of a run: torchrun command lines and the launchers that run them."""

from __future__ import annotations

from typing import Any

from slurm_rlhf.config.schema import Config


def submit(config: Config, local: bool = False) -> Any:
    """Submit a run; returns a submitit job, of which `result()` is the run's summary.

    `config` says what to run and, in its group `slurm`, what to ask Slurm for; `local`: on this machine instead. It is
    checked before. A run that fails makes `result()` raise with the last lines of what failed. Raises ConfigError,
    PlacementError, ModelError, and RunError when sbatch refuses.
    """
    from slurm_rlhf.config.check import check
    from slurm_rlhf.launch.submitit_job import submit as by_submitit

    check(config)
    return by_submitit(config, local)
