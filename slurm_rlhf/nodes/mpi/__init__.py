"""Run the ranks of a job as processes of an MPI launcher: mpirun, mpiexec or srun --mpi.

What lives here: `assignment` (which launcher started this, which rank each of its processes is), `communicator`
(COMM_WORLD, the only user of mpi4py), `rank` (what each process of COMM_WORLD does, and its child that computes),
`launcher` (the conductor's side).

1. Every process tells rank 0 its node, CPUs and GPUs; rank 0 places the roles and broadcasts the rank map (gather,
   broadcast).
2. Rank 0 starts the conductor as a child, collects which arguments each role gets, and broadcasts them.
3. Every process starts its worker. Workers talk to the conductor over the control plane, as under any launcher.
4. Two messages remain: a process tells rank 0 that its worker ended; rank 0 tells all to stop. The control plane cannot
   carry them: they are about workers that have no connection to it any more, because they are dead or hang.
"""
