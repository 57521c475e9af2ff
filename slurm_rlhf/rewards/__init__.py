"""Rewards of responses: by a user's Python function, in workers or here, or by the reward model's ranks.

What lives here: `items` (what a reward is computed of), `signature` (what a function takes), `function` (load, register
and call it), `scored` (what it may answer; responses over the reward model's ranks; `Scoring`, which waits), `pooled`
(its calls in workers and over HTTP, what happens when they fail, and the servers), `sources` (which source a
configuration names, and a sum of several).

May import: base modules, algorithms, config, wire, workers. No torch; `function` and what it imports no numpy.

To add a source of rewards: a class that is called as `RewardFunction` is, its key and its row of `REWARD_SOURCES` in
`config/schema_models.py`, and its place in `sources`.
"""
