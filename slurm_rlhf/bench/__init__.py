"""Measure parts of a run on this machine: `slurm-rlhf bench NAME`.

`rollout` and `train` compare a worker with a short baseline, in turns (`compare`). `sync` starts a process per rank;
`sync_rank` is one of these processes.

May import every room; only `slurm_rlhf.cli.bench` imports this one. To add a bench: a row `["bench NAME"]` in
`cli/commands.toml`, and a module of its name with `run_bench(options, config) -> result` and `show(result) -> text`.
"""
