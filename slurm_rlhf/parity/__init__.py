"""Compare the log-probs of engine, plain transformers and trainer for the same tokens: `slurm-rlhf check-parity`.

`subjects` says what is compared on which prompts, `sides` has the three ways to compute; `stages` runs them in
processes of their own, which `processes` starts one after the other with a time limit; `verdicts` judges and shows.

May import every room but ranks, bench and cli; torch and transformers inside functions or in `sides`. To
add an architecture: its rows in `tests/support/random_models.py` and `config.architectures.COMPARED`, where it stays
if `tests/lab/parity_matrix.py` agrees.
"""
