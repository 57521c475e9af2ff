"""Break small runs on purpose, in every phase, and tell what each fault did: `slurm-rlhf campaign`.

Pure: `faults` (the table of faults), `draw` (an order of them from a seed), `verdicts` (what observations mean),
`result` (campaign.json and the summary), `page` (the same as HTML).
Real: `workload` (the tiny run), `holds` (what holds it up), `processes` (who belongs to a run), `session` (one start of
it), `injection`, `files` and `intruders` (doing it), `watch` (what the run makes of it), `leader` (session by session:
one start of the run recovers from the last fault and meets the next one), `storm` (a long run that is killed again and
again).

May import every room but workers, training, rollout, bench and cli. To add a fault: a row in `faults`, and for a new
kind its function in `injection.INJECT`.
"""
