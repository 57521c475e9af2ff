"""Rewards of responses: by a user's Python function, in workers or here, or by the reward model's ranks.

What lives here: `items` (the input of a reward), `signature` (the arguments of a function), `function` (load, register
and call it), `scored` (check its answer; scores by the reward model's ranks; `Scoring`, which waits), `pooled` (calls
in workers and over HTTP, what happens when they fail, and the servers), `sources` (the source that a configuration
names, and a sum of several), `presets` and `reasoning_gym` (rewards that need no code).

May import: base modules, algorithms, config, wire, workers. No torch; `function` and what it imports no numpy.

To add a source of rewards: a class that is called as `RewardFunction` is, its key and its row of `REWARD_SOURCES` in
`config/schema_models.py`, and its place in `sources`.
"""
