"""Find out where a run may run: the Slurm allocation or this machine, its nodes, GPUs and networks.

Here live what Slurm's environment and `scontrol` say, the GPUs of this machine, network addresses, requests to stop,
the kernel cache of a node, and the file that says who works on a run directory. May import the base modules,
config and placement; no torch and no numpy, so that a login node starts at once.

To read one more variable of Slurm: a field of `SlurmEnvironment`. To support another scheduler: a module beside
`slurm_environment` that gives a `Topology`, and a branch in `resources.current_topology`; starting processes with it is
the task of nodes/.
"""
