"""Losses of the policy: functions of one micro-batch, and the table from which `actor.policy_loss_type` chooses.

What lives here: `inputs` (what a loss may look at, what all share, and the guard around a user's), `clipped` (PPO,
GSPO), `reweighted` (CISPO, SAPO, DPPO), `table`. All of them call methods of tensors and import no torch.

To add one: a function with formula and source, its record in `table`, its name in `config/schema_models.py`. The tests
in `tests/algorithms/test_policy_losses.py` walk the table.
"""
