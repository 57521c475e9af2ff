"""Start the processes of a run, on one machine, under Slurm or under MPI, look at the nodes, and submit runs as jobs.

Agents: `agent` is the task of every step, and `agent_steps` has the conductor's end of the connections. In the step
`nodes`, over all nodes from before a run to its end, an agent examines its node (`examiner`, which returns `facts`),
and looks at its processes in a hang (`node_look`). In a role's step it is the parent of the role's processes
(`child_process`), which get an `environment` and start as `facts.StepSpec` says. In the step `workers` it has the
workers of nodes that are kept for these. Without Slurm one agent, a child of the conductor, does all.
Starting: `launcher` (what starts roles and engines), `agent_launcher` with `agent_steps` and `srun` (in a Slurm job,
and on one machine), `mpi/` (all of MPI).
Jobs: `requeue` (the next job of a run; a job that has lost its first node), `submitit_job`.
Examining: `examination` asks the nodes by an `interview` and judges, `needs` says what a run needs of them, and judges
their GPUs; `examiner` starts a light process per rank for the collectives that `groups` lists. Pure:
`network_checks` and `node_checks`; `report` shows them.

mpi4py only in `mpi/assignment`, submitit only in `submitit_job`, torch only in `group_rank`, inside functions.

To add a launcher: implement `launcher.Launcher` in a file of its own, and choose it in `cli.train`. To add a check: a
fact in `facts.NodeFacts`, collected in `examiner`, a function in one of the `..._checks` files, and its place in
`examination.judge`.
"""
