"""Answer the rows of a file with engines on every GPU of the allocation: `slurm-rlhf generate`.

`job` leads: it starts the engines, hands rows to them (`rows`), and writes the answers (`output`, which reports
the progress, too). The output shows which rows are done, so a job that was killed goes on where the file ends;
`identity` keeps a job with another model or sampling out of it, and divides a file among the tasks of an array,
whose outputs it puts together.
`model_source` finds the weights, `rows` tokenizes the rows and scores the responses.

May import every room but ranks, trainer, bench and cli, and no torch. Engines do not know of each other: there is no
collective between them, so none can time out. To add a column of the output: `output.line_of`.
"""
