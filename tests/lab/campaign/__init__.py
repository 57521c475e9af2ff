"""Break small runs on purpose, in every phase, and tell what each fault did: `fault_campaign.py`, and `-m campaign`.

Pure: `faults` (the table of faults), `draw` (an order of them from a seed), `verdicts` (what observations mean),
`result` (campaign.json and the summary).
Real: `workload` (the tiny run), `processes` (who belongs to a run), `session` (one start of it), `injection` and
`files` (doing it), `watch` (what the run makes of it), `leader` (session by session: one start of the run recovers from
the last fault and meets the next one), `warm` (runs that start quickly), `cluster`, `cluster_faults` (the same on a
Slurm).
"""
