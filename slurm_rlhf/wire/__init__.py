"""The control plane: typed calls from the conductor to the ranks, over authenticated and encrypted sockets.

The conductor holds one `ControlServer` and a `RoleHandle` per role (`handles`), every rank one `ControlClient`.
Both keep their sockets on a thread of their own, so heartbeats go on while the main thread computes.
`calls` declares every call with its records, `codec` carries them with msgspec, `auth` says who may connect.

It may import base modules, the configuration and algorithms; it owns zmq.
To add a call: its records and its method, with `@call`, in `calls`; its implementation in `ranks`. To add a role: a
class of calls, and its row in `config.roles`.
"""
