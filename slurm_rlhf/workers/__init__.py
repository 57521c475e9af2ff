"""Code of users in processes of its own, beside the conductor.

What lives here: `channel` (messages between the two, over a socket that the worker inherits), `process` (the program of
a worker: it makes one object and calls its methods), `pool` (starts workers, gives each call a deadline, and replaces a
worker that hangs, ends or grows too large).

May import: base modules, wire's table of time-outs, observe's stacks, cluster. No torch, no numpy, so that a worker
starts in a tenth of a second.

To have code run there: a class of the room that needs it, whose arguments, calls and answers are plain values, named by
`Code`.
"""
