"""Weights travel from the actor to the engines, over process groups made for nothing else.

`plan` says which bytes go where, `group` builds a group across separately started processes, `push` and `receive` are
its two ends, `transport` is the seam behind which gloo and NCCL sit.
"""
