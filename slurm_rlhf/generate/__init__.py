"""Answer the rows of a file with engines on every GPU of the allocation: `slurm-rlhf generate`.

`job` leads: it starts the engines (`fleet`), hands rows to them (`row_queue`), and writes what comes back (`output`).
What is done stands in the output itself, so a job that was killed goes on where the file ends; `identity` keeps a job
with another model or sampling out of it. `model_source` finds the weights, `prompts` tokenizes the rows, `answers`
scores and writes what comes back, `progress` tells, `shards` and `merge` divide a file and put it together again.

May import every room but ranks, trainer, bench and cli, and no torch. Engines do not know of each other: there is no
collective between them, so none can time out. To add a column of the output: `output.line_of`.
"""
