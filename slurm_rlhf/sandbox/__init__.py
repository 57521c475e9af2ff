"""Run programs that nobody trusts, such as code that a policy wrote: no network, no files of others, limits on all.

What lives here: `box` (run a program in a sandbox, and find the best kind of sandbox that a node has, with its command
line; run the program in a response against the tests of its row), `launcher` (a program that takes rights away from
itself and then becomes the one that is not trusted; `system_calls.toml` lists the calls that it refuses), and
`unit_tests` (the program that runs a row's tests inside).

May import: base modules, wire's time-outs. No torch.

To add a kind of sandbox: its name in `reward.sandbox`, its command in `box.COMMANDS`, and what it cannot do in
`box.LACKS`. `tests/sandbox/test_hostile.py` runs hostile programs in every kind that the machine has.
"""
