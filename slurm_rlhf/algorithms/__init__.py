"""The numbers of reinforcement learning as pure functions: no processes, no devices, no configuration objects.

What the conductor computes is numpy (`advantages`, `kl`, `batching`, `registry`), what is differentiated is torch
(`losses`, the only file here that imports it).
"""
