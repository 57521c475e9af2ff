"""Start the processes of a run, on one machine, under Slurm or under MPI, and submit runs as jobs.

What lives here: `launcher` (the protocol, and one machine), `slurm` with `srun` (the steps of a job) and `node`, `mpi/`
(all of MPI); `engine_launcher` (the protocol of engines, and one machine), `slurm_engines`, `engine_node`; `slurm_run`
(what all steps of a run share), `step_spec` (what a role's processes are started with), `child_process`; `node_look`
(what a node has, and what its processes do in a hang) and `accelerators` (checks before a start); `requeue` (the next
job of a run), `headless` (a job that has lost its first node); `submitit_job`.

May import: the base modules, `config`, `placement` and `cluster`. mpi4py only in `mpi/communicator`, submitit only in
`submitit_job`, both inside functions.

To add a launcher: implement `launcher.Launcher` in a file of its own, and choose it in `cli.train`.
"""

from __future__ import annotations

from typing import Any

from slurm_rlhf.config.schema import Config


def submit(config: Config, local: bool = False) -> Any:
    """Check `config` and submit a run; return a submitit job, whose `result()` is the summary of the run.

    `config` says what to run and, in its group `slurm`, what to ask Slurm for; `local`: run on this machine instead.
    If the run fails, `result()` raises with the last lines of what failed. Raises ConfigError,
    PlacementError, ModelError, and RunError when sbatch refuses.
    """
    from slurm_rlhf.config.check import check
    from slurm_rlhf.launch.submitit_job import submit as by_submitit

    check(config)
    return by_submitit(config, local)
