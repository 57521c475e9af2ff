"""The conductor's side of every process group: what it knows of their ranks, and what it does when one hangs or dies.

`supervisor` watches the processes, `deaths` and `first_failure` find out who broke something, `restart_rules` and
`trainer_recovery` start roles again; `engine_pool` and `engine_recovery` do so for engines, `fleet` for those of
`slurm-rlhf generate`. `watchdog` notices a run that stands still, by `hang_rules`, and `hang_report` writes what is
known. `run_lock` keeps a run directory for one run. No torch: tensors are the ranks'.
"""
