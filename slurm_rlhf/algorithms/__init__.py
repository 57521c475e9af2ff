"""The numbers of reinforcement learning as pure functions: no processes, no devices, no configuration objects.

What lives here: `registry` (the record of an algorithm), `methods` (one record each), advantages, losses, their
aggregation, KL, reward scaling, batching, staleness, and `plugins` (records from the user's files).

May import: records, errors, user files, numpy. Losses call methods of tensors and import torch for type checks only.

To add an algorithm: a file in `methods`, a recipe in `sbatch/`.
"""
