"""Find out what a run can use: the Slurm allocation or this machine, its nodes, GPUs and networks.

What lives here: Slurm's environment and jobs (`slurm_*`), `resources` (nodes, slots, GPU memory, partitions),
`gpu_query`, `network`, `processes` (also the file that names the conductor of a run), `local_directory` (also compiled
kernels), `stop` (requests to stop). May import the base modules, config and placement; no torch and no numpy, so that a
login node starts at once.

To read one more variable of Slurm: a field of `SlurmEnvironment`. To support another scheduler: a module that returns a
`Topology`, like `slurm_environment`, and a branch in `resources.current_topology`; `nodes` starts its processes.
"""
