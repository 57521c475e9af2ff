"""Backends: the ways on which buckets of weights travel, behind the one seam of `backend.Backend`.

`gloo` (chunks over sockets, and through `shared_memory` inside a node), `nccl`, `device_ipc` (memory of one GPU) and
`disk`; `table` makes the one that the members agreed on. To add one: a class with the five methods of `Backend`, a
branch in `table`, its name and its conditions in `rendezvous.choose`, and its name in the parameters of
tests/weights/test_backends.py, the conformance test of all backends.
"""
