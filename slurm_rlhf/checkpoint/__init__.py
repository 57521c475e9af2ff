"""Write checkpoints that survive a kill at any moment, and find the one to resume from.

What lives here: `directory` (saving and pruning the checkpoints of a run, and how often), `resume` (finding and
checking them, the list of the files of one, and the conductor's state as JSON).

May import: the base modules. No torch: roles write their own files into the directory that `begin` returns.

To save something new: a role writes more files below its own name; the conductor adds entries to the state it commits.
"""
