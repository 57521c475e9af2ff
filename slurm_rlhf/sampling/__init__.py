"""Hand prompts to engines, and make batches of what comes back.

`dispatch` sends fixed batches and streams, `group_stream` keeps engines busy while the trainers work, by the rules in
`group_rules`; `engine_feed` says how much an engine takes; `actor_sampler` lets an actor sample itself; `row_queue` is
for rows of `slurm-rlhf generate`. `batch_sources` and `batches` make what a step trains on. No torch.
"""
