"""Sample groups of episodes, and make batches of them.

`episodes` runs each episode as a coroutine, `scheduler` decides which engine gets its next request, `waves` how where
nothing may depend on time. `batch_sources` and `group_stream` make what a step trains on, by the rules in
`group_rules`; `row_queue` is for rows of `slurm-rlhf generate`. No torch.
"""
