"""Train a model on a data set, without engines: `slurm-rlhf sft`, `rm` and `dpo`.

What lives here: `stage` (the loop that all stages share), `kinds` (SFT, reward models, DPO and kin: a loss and a data
set each), `examples` (answers and pairs as packed experience), `view` (what `slurm-rlhf data` shows), `record`
(metrics, log, checkpoint and signals), `launch` (ranks of a stage in a Slurm job or on this machine).

May import: the trainer, groups, and what is below them. To add a stage: a subclass of `StageTrainer` in `kinds`, its
row in `kinds.stage_trainer`, its group of keys in `config/schema_jobs.py`, and its row in `cli/commands.toml`.
"""
