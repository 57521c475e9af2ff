"""The ranks of the roles: one process per rank, under torchrun, which answers the calls of the conductor.

`torchrun` is torch's launcher with a store on one address, `rank_process` starts a rank, `worker` has the base class;
`model_workers` has actor, critic, reference and reward; `engine_leader` and `engine_follower` are the ranks of an
engine, which `follower_links` connects: a leader that takes calls, and followers that do what the leader says.

It may import every package below it.
To add a role: its row in `config.roles`, its group in `config.schema`, a class of calls in `wire.calls`, and a
class here that subclasses `Worker` and that class of calls.
"""
