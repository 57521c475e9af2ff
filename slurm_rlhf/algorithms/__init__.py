"""The numbers of reinforcement learning as pure functions: no processes, no devices, no configuration objects.

What lives here: `registry` (the records of algorithms and corrections, and those of the user's files), `methods` (one
file a family), advantages, `policy_losses` (the table of them), the other losses, KL and staleness, their aggregation,
the correction between engine and trainer, reward scaling, and batching.

May import: records, errors, user files, numpy. Losses call methods of tensors and import torch for type checks only.

To add an algorithm: a file in `methods`, a recipe in `sbatch/recipes/`.
"""
