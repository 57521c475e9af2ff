"""Parse command lines and run the commands of `slurm-rlhf`.

What lives here: `main` (the table of commands, what they share, errors to exit codes), a file for each command or group
of commands, with the name of the command even where another room has a file of that name, `placement_report` (ranks and
memory, for `plan` and `train`), `examine` (the nodes, before a run starts), `mpi_start` (the start under mpirun or
srun --mpi).

May import: every room, but heavy libraries only inside functions: `slurm-rlhf plan` starts in under a second.

To add a command: a file with an entry in its `COMMANDS`, and a row in `main.COMMANDS`.
"""
