"""Compute advantages, losses, corrections and batches in pure functions: no processes, devices or config objects.

Files: `registry` (the records of algorithms and corrections, also from the user's files), `methods` (one file per
family), `advantages`, `policy_losses` (their table), `losses` (the others, KL, staleness, aggregation), `correction`
(between engine and trainer), `reward_shaping`, `batching`.

May import: records, errors, user files, numpy. Losses call methods of tensors and import torch for type checks only.

To add an algorithm: a file in `methods`, a recipe in `sbatch/recipes/`.
"""
