"""The configuration: schema, reading and writing, rules, help. No torch, no numpy: a login node starts at once."""
