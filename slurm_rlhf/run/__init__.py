"""A training run: how it starts, goes from step to step, is saved, resumed and ended.

`conductor` begins and ends a run, `startup` puts its parts together, `loop` goes from step to step, and `step` tells
what happens in one. `run_state` saves and loads; `self_check`, `gpu_account` and `reporting` tell the user. No torch:
tensors are the ranks'.

To add something to each step: its call in `wire/calls.py`, its line in `TrainingStep.run` or in what that calls.
"""
