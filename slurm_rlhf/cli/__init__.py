"""Parse command lines and run the commands of `slurm-rlhf`.

What lives here: `main` (the table of commands, their common parsing, errors to exit codes), a file for each command or
group of commands, and `mpi_start` (the start under mpirun or srun --mpi). `runs` finds runs, cancels and reports them;
`plan` also places ranks and checks memory for other commands; `preflight` also examines nodes before a run.

May import: every room, but heavy libraries only inside functions: `slurm-rlhf plan` starts in under a second.

To add a command: a file with an entry in its `COMMANDS`, and a row in `main.COMMANDS`.
"""
