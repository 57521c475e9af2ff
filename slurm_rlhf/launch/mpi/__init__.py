"""Runs that mpirun or srun --mpi starts."""
