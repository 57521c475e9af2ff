"""The control plane: typed calls from the conductor to the ranks, over authenticated and encrypted sockets.

The conductor holds one `ControlServer` and a `RoleHandle` per role; every rank holds one `ControlClient`.
Both keep their sockets on a thread of their own, so heartbeats go on while the main thread computes.
"""
