"""RLHF on HPC clusters with nothing but Slurm (or MPI, or one machine), torchrun, DeepSpeed and vLLM."""

__version__ = "0.1.0"
