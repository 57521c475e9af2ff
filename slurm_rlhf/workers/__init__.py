"""Code of users in processes of its own, on the conductor's node or on nodes of their own.

What lives here: `process` (the program of a worker, which makes one object and calls its methods, and
the messages to it), `pool` (starts workers, gives each call a deadline, and replaces a
worker that hangs, ends or grows too large), `distant` (the two ends of workers on other nodes),
`http` (their calls over HTTP: a server, and a client that asks it, or others, again while they are away).
`polling.UNDER_WAY` knows the calls that this process waits for.

May import: base modules, config in annotations, observe's stacks and names of events, wire's table of time-outs,
cluster. No torch, no numpy, so that a worker starts in a tenth of a second. httpx in `http` alone, inside
functions.

To have code run there: a class of the room that needs it, whose arguments, calls and answers are plain values, named by
`Code`.
"""
