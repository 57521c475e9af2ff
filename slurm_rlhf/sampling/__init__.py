"""Sample groups of episodes, and make batches of them.

`episodes` runs each episode as a coroutine, `scheduler` decides which engine gets its next request, in waves if nothing
may depend on time. `group_stream` makes what a step trains on, by the rules in `batches`; `row_queue` is for rows of
`slurm-rlhf generate`. No torch.
"""
