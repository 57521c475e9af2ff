"""Run the ranks of a job as processes of an MPI launcher: mpirun, mpiexec or srun --mpi.

What lives here: `assignment` (which launcher started this, which rank each of its processes is, and COMM_WORLD: the
only user of mpi4py), `rank` (what each process of COMM_WORLD does: it is the agent of one rank; the conductor's side).

1. Every process tells rank 0 its node, CPUs and GPUs; rank 0 places the roles and broadcasts the rank map (gather,
   broadcast).
2. Rank 0 starts the conductor as a child, and broadcasts where it listens for agents, with their keys.
3. From then on every process is an agent: the first on a node examines it, each starts what the conductor says, and
   tells how that ended.
4. All processes leave MPI together: a launcher takes one that ends without it for a crash.
"""
