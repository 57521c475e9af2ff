"""Parse command lines and run the commands of `slurm-rlhf`.

What lives here: `main` (from words to a command, from errors to exit codes), `commands` (the table `commands.toml`, and
the parsing of words by it), and a file for each command or group of commands. `mpi` starts them under mpirun and srun
--mpi; `runs` finds runs, cancels and reports them; `plan` also places ranks and checks memory for other commands;
`preflight` also examines nodes before a run.

May import: every room, but heavy libraries only inside functions: `slurm-rlhf plan` starts in under a second.

To add a command: a file with its function, and a row in `commands.toml`.
"""
