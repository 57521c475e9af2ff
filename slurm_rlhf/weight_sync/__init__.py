"""Weights travel from the actor to the engines, over process groups made for nothing else.

`layout`, `plan` and `route` say which bytes go where and on which way: pure data. `group` builds a group across
separately started processes; `push` and `receive` are the two ends of an update; `carrier` is the seam behind which the
ways of the bytes lie: relays over gloo, NCCL, shared memory, files.
"""
