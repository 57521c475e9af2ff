"""Benches: `slurm-rlhf bench NAME` measures a part of a run on this machine.

`options` names the benches and parses their options; it imports nothing heavy, so that help is quick. `engine` and
`train` compare a worker with a baseline of few lines, in turns (`compare`). `sync` starts a process per rank;
`sync_rank` is one of these processes.

May import every room; only `slurm_rlhf.cli.bench` imports this one. To add a bench: a record in `options.BENCHES` and a
module of its name with `run(given) -> results` and `show(results) -> text`.
"""
