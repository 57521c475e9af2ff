"""Weights travel from the actor to the engines, over process groups made for nothing else.

`transfer_plan` and `routes` say which bytes go where and on which way: pure data, without torch. `group` joins
separately started processes (`rendezvous`), watches them and finds out who broke an update (`diagnosis`, `update`).
`ends` are the actor's and the engines' ends, `bucket` is what they exchange and compare, `backends` are the ways of the
bytes; to add one: .github/CONTRIBUTING.md. `lead` is the conductor's side.

May import `config`, `records`, `errors`, `placement`, `cluster`, `wire`, `process_groups` and the helpers. No engine is
imported here: an engine loads what `Receiver.update` yields.
"""
