"""Measurements: `slurm-rlhf bench ...`."""
