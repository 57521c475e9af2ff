"""Parse command lines and run the commands of `slurm-rlhf`.

What lives here: `main` (the table of commands, errors to exit codes), `arguments` (what all commands share), a file for
each command or group of commands, `placement_report` (ranks and memory, for `plan` and `train`), `run_lookup` (which
run a directory or job number means), `mpi_start` (the start under mpirun or srun --mpi).

May import: every room, but heavy libraries only inside functions: `slurm-rlhf plan` starts in under a second.

To add a command: a file with an entry in its `COMMANDS`, and a row in `main.COMMANDS`.
"""
