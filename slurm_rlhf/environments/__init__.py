"""Environments: what answers the policy between its turns, and the tokens and tool calls of the turns.

In processes of the worker pool: `kinds` (the conventions that a user's file may follow, and the environments of many
episodes), `executor` (OpenRLHF's agents that ask the engine themselves), `user_class` (calls of a user's class,
methods as tools). In the conductor: `host` (calls those processes, or those of servers), `turn_tokens` (what stands
after a turn that was sampled), `tool_calls` (the calls in its text, by the formats of `formats.toml`). Where
environments are served to runs: `host`, too. `records` travels between them.

May import: base modules, config, data, workers. transformers in `_transformers` alone, inside functions. No torch.

To add a format of tool calls: a table in `formats.toml`. To add a convention: a class in `kinds`, and its row of
`KINDS`.
"""
