"""The conductor: the one process without a device that starts the roles, leads every step, and ends everything again.

`conductor` begins and ends a run, `startup` puts its parts together, `loop` goes from step to step, and `step` tells
what happens in one. `supervisor` watches the processes; `engine_pool`, `weight_updates`, `dispatch`, `engine_feed` and
`colocation` deal with the engines, `actor_sampler` with an actor that samples itself; `batch_sources` and
`group_stream` make the batches, by the rules in `group_rules`; `run_state` saves and loads; `self_check`, `gpu_account`
and `reporting` tell.

May import every room but workers, training, bench and cli, and no torch: tensors are the ranks'. To add
something to each step: its call in `control/calls.py`, its line in `Step.run` or in what that calls. To add a role: see
`config/roles.py`; the conductor starts and saves what is in that table.
"""
