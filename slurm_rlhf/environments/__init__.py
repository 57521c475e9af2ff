"""Environments: what answers the policy between its turns, and the tokens and tool calls of the turns.

In a process of the pool: `kinds` (the conventions that a user's file may follow), `tools` (methods as tools),
`instances` (the environments of many episodes). In the conductor: `turn_tokens` (what stands behind a turn that was
sampled), `tool_calls` (the calls in its text, by the formats of `formats.toml`).

May import: base modules, config, data. transformers in `_transformers` alone, inside functions. No torch.

To add a format of tool calls: a table in `formats.toml`. To add a convention: a class in `kinds`, and its row of
`KINDS`.
"""
