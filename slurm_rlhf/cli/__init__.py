"""The `slurm-rlhf` command. `main.py` holds the table of commands; each one lives in a file of its name."""
