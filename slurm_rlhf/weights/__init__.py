"""Weights travel from the actor to the engines, over process groups made for nothing else.

`transfer_plan` and `routes` say which bytes go where and on which way: pure data, without torch. `group` joins
separately started processes (`rendezvous`), watches them (`liveness`) and finds out who broke an update
(`diagnosis`, `update`). `sender` and `receiver` are the two ends, `bucket` is what they exchange and `checksum` what
they compare, `backends` are the ways of the bytes; that package says how to add one. `_torch` has every private name of
torch.

May import `config`, `errors`, `cluster`, `wire` and the helpers. No engine is imported here: one loads what
`Receiver.update` yields.
"""
