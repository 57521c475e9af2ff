"""Run `slurm-rlhf generate` and `eval`: answer the rows of a file, or evaluate a model, with engines only."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from slurm_rlhf.cli.commands import Arguments
from slurm_rlhf.cli.preflight import OFF, question, steps_of, tell
from slurm_rlhf.cli.train import launcher_on
from slurm_rlhf.cluster.resources import nodes_here
from slurm_rlhf.config.load import load_config
from slurm_rlhf.config.roles import ROLLOUT
from slurm_rlhf.config.schema import Config
from slurm_rlhf.config.user_data import data_files
from slurm_rlhf.errors import ConfigError
from slurm_rlhf.nodes.examination import examine_nodes
from slurm_rlhf.nodes.launcher import Launcher
from slurm_rlhf.nodes.mpi.assignment import launched
from slurm_rlhf.nodes.needs import Needs, Wanted
from slurm_rlhf.placement.rank_map import RankMap

Places = Sequence[tuple[str, str]]
"""(key, path) of each file that every node reads."""


def generate_rows(arguments: Arguments) -> int:
    """Answer the rows that are left. Raises SlurmRlhfError."""
    refuse_many_processes("generate")
    config = load_config(arguments.files, arguments.overrides)
    from slurm_rlhf.generate.job import generate, prepare

    shard, source = prepare(config, os.environ)
    directory = shard.directory(Path(config.run_dir))
    places = [("generate.dataset", str(file)) for file in data_files(config.generate.dataset)]
    with engine_launcher(config, directory, places) as (ranks, launcher):
        return generate(config, shard, source, ranks, launcher)


def refuse_many_processes(command: str) -> None:
    """Raise ConfigError if MPI has started several of this process."""
    if launched(os.environ) is not None:
        raise ConfigError(
            "this process is one of several that mpirun or srun --mpi started, and each would answer all rows: start "
            f"`slurm-rlhf {command}` once, it starts the engines on all nodes itself"
        )


@contextmanager
def engine_launcher(config: Config, directory: Path, places: Places) -> Iterator[tuple[RankMap, Launcher]]:
    """Examine the nodes; yield their engines, and what launches these. Raises PlacementError if they cannot start."""
    from slurm_rlhf.generate.job import engines_everywhere

    per_node = config.generate.engines_per_node
    ranks = engines_everywhere(nodes_here(os.environ), config.vllm.tensor_parallel_size, per_node)
    directory.mkdir(parents=True, exist_ok=True)
    with steps_of(config, directory) as steps:
        if config.preflight == OFF:
            steps.begin(steps.orders())
        else:
            slurm = steps.slurm
            needs = Needs(
                run_dir=str(directory),
                wanted=Wanted.by(ranks, config),
                ranks_on={share.node: len(share.ranks) for share in ranks.roles[ROLLOUT]},
                places=tuple(places),
                granted_by="ask for them with --gpus-per-node" if slurm else "start it where nvidia-smi shows GPUs",
            )
            # Each node by itself: engines do not talk to each other, so links between nodes do not matter.
            asked = replace(question(config, ranks, needs, ranks.used_nodes, slurm), measure=False)
            tell(examine_nodes(asked, steps)[0])
        yield ranks, launcher_on(directory, ranks, {}, steps)


def merge_parts(arguments: Arguments) -> int:
    """Put the parts of a job array together. Raises SlurmRlhfError."""
    directory, given = Path(arguments.one_word("run directory")), arguments.options
    from slurm_rlhf.generate.identity import merge

    path, lines, shards = merge(directory, Path(given["output"]) if "output" in given else None, "partial" in given)
    print(f"{lines} lines of {shards} {'shard' if shards == 1 else 'shards'} in {path}")
    return 0


def evaluate(arguments: Arguments) -> int:
    """Answer and score the prompts that are left, and print the report. Raises SlurmRlhfError."""
    options = {name: Path(os.path.abspath(Path(path).expanduser())) for name, path in arguments.options.items()}
    refuse_many_processes("eval")
    model = options.get("model")
    if model is None:
        raise arguments.error("--model is missing: name the model, run or checkpoint to evaluate")
    config = load_config(arguments.files, arguments.overrides)
    from slurm_rlhf.eval.report import report_text
    from slurm_rlhf.generate.job import EvalJob

    job = EvalJob.prepare(config, model, options.get("output"))
    for one in job.sets:
        if one.prompts.dropped:
            print(f"evaluation {one.settings.name}: {one.prompts.dropped} prompts are too long and are dropped")
    places = [
        (f"eval.datasets, {one.settings.name}", str(file)) for one in job.sets for file in data_files(one.settings.path)
    ]
    with engine_launcher(config, job.root, places) as (ranks, launcher):
        code = job.run(ranks, launcher)
    if code:
        return code
    print(f"\n{report_text(job.report().reports)}\n\nreport: {job.root / 'eval.json'}", flush=True)
    return 0
