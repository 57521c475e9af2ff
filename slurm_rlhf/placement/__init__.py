"""Plan a run before anything starts: which rank goes where, and whether the memory of the GPUs is enough.

Here live the topology, the sizes of the roles, the packing that makes the rank map, its drawing, the explanation of
what does not fit, and the memory estimate with the keys that help. Pure: no torch, no processes; the only files read
are its tables and config.json of the models. May import the base modules and config.

To add a role: its row in `config.roles` is all that this room needs. To add an architecture to the memory estimate: a
row in `families.json`. To add a GPU: a row in `gpus.json`.
"""
