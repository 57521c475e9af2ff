"""Start the processes of a run, on one machine, under Slurm or under MPI, look at the nodes, and submit runs as jobs.

Starting: `launcher` (the protocol, and one machine), `engine_launcher` (the same for engines), `slurm` and
`slurm_engines` with `srun` (the steps of a job), `mpi/` (all of MPI); `slurm_run` (what all steps of a run share).
`agent` is the task of every step: in a role's step the parent of the role's processes on its node (`children`,
`child_process`), which get an `environment` and what `step_spec` says; `agent_steps` is the conductor's end.
Jobs: `requeue` (the next job of a run), `orphan` (a job that has lost its first node), `submitit_job`.
Looking: `examination` asks the nodes and judges, `needs` says what a run wants of them; `agents` reaches the agent of
each node, whose `examiner` collects `facts` with `collect`; `group_host` starts a light process per rank for the
collectives that `groups` lists. Pure: `network_checks`, `node_checks`, `file_checks` and `speed_checks`; `report`
shows them.
`node_look` says what a node has and what its processes do in a hang, `accelerators` has checks before a start.

mpi4py only in `mpi/communicator`, submitit only in `submitit_job`, torch only in `group_rank`, inside functions.

To add a launcher: implement `launcher.Launcher` in a file of its own, and choose it in `cli.train`. To add a check: a
fact in `facts.NodeFacts`, collected in `collect`, a function in one of the `..._checks` files, and its place in
`examination.judge`.
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
    from slurm_rlhf.nodes.submitit_job import submit as by_submitit

    check(config)
    return by_submitit(config, local)
