"""Sample groups of episodes, and make batches of them.

`episodes` runs each episode as a coroutine, `scheduler` decides which engine gets its next request, `waves` how, if
nothing may depend on time. `group_stream` makes what a step trains on, by the rules in `group_rules`; `row_queue` is
for rows of `slurm-rlhf generate`. No torch.
"""
