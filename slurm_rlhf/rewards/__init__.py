"""Rewards of a batch of responses: from a user's Python function, or from the reward model's ranks.

What lives here: `function` (load, register and call the user's function, what it is passed and what it may answer),
`model` (spread responses over the reward model's ranks; for both, deadlines and where prints go).

May import: base modules, algorithms, control. No torch.

To add a source of rewards: a class that is called as `RewardFunction` is, its key and its row of `REWARD_SOURCES` in
`config/schema_models.py`, and the place in `run/run_inputs.py` where it is made.
"""
