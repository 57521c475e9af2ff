"""Rewards of sampled responses: from a user's Python function, or from the reward role.

`function` finds and calls the function, `arguments` are what its signature may ask for, `values` checks what it
answers; `model` asks the reward role instead, and holds both to a deadline. May import the base, algorithms and
control. To add a source of rewards: a class that is called as `ModelRewards` is, and its choice in
`controller/startup.py`; to add an argument: its row in `arguments.ARGUMENTS`.
"""
