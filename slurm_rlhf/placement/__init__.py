"""Plan a run before anything starts: which rank goes where, and whether the memory of the GPUs is enough.

What lives here: the topology, the sizes of the roles, the packing that makes the rank map, its drawing, the explanation
why roles do not fit, and the estimates of memory, with the keys that help, and of a step's time. Pure: no torch, no
processes; it reads only its own tables and config.json of the models. May import the base modules and config.

To add a role: its row in `config.roles` is all that this room needs. To add an architecture to the memory estimate: a
row in `families.json`. To add a GPU: a row in `gpus.json`.
"""
