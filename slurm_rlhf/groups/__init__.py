"""The conductor's side of every process group: what it knows of their ranks, and what it does when one hangs or dies.

`supervisor` watches the processes, `deaths` finds out which one broke something, `trainer_recovery` starts roles again;
`engine_pool` and `engine_recovery` do so for engines, `fleet` for those of `slurm-rlhf generate`. `watchdog` notices a
run in which nothing moves, `hang_rules` name the ranks that cause it, and `hang_report` writes the details. `run_lock`
keeps a run directory for one run, and leads a run to its end or its stop. No torch: tensors are the ranks'.
"""
