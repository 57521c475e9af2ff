"""A training run: how it starts, goes from step to step, is saved, resumed and ended.

`conductor` begins and ends a run, `startup` puts its parts together, `loop` goes from step to step, and `step` does
one step, `update` its training. `run_state` saves and loads; `self_check`, `gpu_account` and `reporting` inform the
user. No torch: only the ranks have tensors.

To add something to each step: its call in `wire/calls.py`, its line in `TrainingStep.run` or in what that calls.
"""
