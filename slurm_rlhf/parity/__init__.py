"""Compare the log-probs of engine, plain transformers and trainer for the same tokens: `slurm-rlhf check-parity`.

`verdicts` finds the models, makes the prompts, judges and shows; `sides` has the three ways to compute; `processes`
runs these in processes of their own, one after the other, with a time limit.

May import every room but ranks, bench and cli; torch and transformers inside functions or in `sides`. To
add an architecture: its rows in `tests/support/random_models.py` and `config.architectures.COMPARED`, where it stays
if `tests/lab/parity_matrix.py` agrees.
"""
