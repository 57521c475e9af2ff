"""The conductor's side of every process group: what it knows of their ranks, and what it does when one hangs or dies.

`supervisor` watches the processes, `engines` those that may start again alone; `deaths` finds out which process broke
something, and knows who is not heard. `restarts` says what a role or an engine may be (starting, up, lost, ended), and
what starts again; `trainer_recovery` plans it, and `engine_pool` gives engines that have started the weights.
`watchdog` notices a run in which nothing moves, `hang_rules` name the ranks that cause it, and `hang_report` writes the
details. `run_lock` keeps a run directory for one run, and leads a run to its end or its stop.
No torch: tensors are the ranks'.
"""
