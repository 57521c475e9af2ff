"""Run `slurm-rlhf generate` and `eval`: answer the rows of a file, or evaluate a model, with engines only."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from slurm_rlhf.cli.main import Command, parse, take_options
from slurm_rlhf.cli.preflight import OFF, begin, question, steps_of
from slurm_rlhf.cli.train import configured, launcher_on
from slurm_rlhf.cluster.resources import nodes_here
from slurm_rlhf.config.roles import ROLLOUT
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import ConfigError, printable
from slurm_rlhf.nodes.accelerators import Wanted
from slurm_rlhf.nodes.examination import Examination, look_here
from slurm_rlhf.nodes.launcher import Launcher
from slurm_rlhf.nodes.mpi.assignment import launched
from slurm_rlhf.nodes.needs import Needs, lock_problem
from slurm_rlhf.nodes.report import Report
from slurm_rlhf.placement.rank_map import RankMap

if TYPE_CHECKING:
    from slurm_rlhf.nodes.agent_steps import AgentSteps

USAGE = (
    "usage: slurm-rlhf generate FILE.toml [FILE.toml ...] [--KEY=VALUE ...]\n"
    "       slurm-rlhf generate merge RUN_DIR [--output FILE] [--partial]"
)
Places = Sequence[tuple[str, str]]
"""(key, path) of each file that every node reads."""
SETTINGS = ("train", "ds", "logger", "timeout", "slurm")
OPTIONS = {
    "output": "for merge: the file to write [merged.jsonl in RUN_DIR]; an existing file is not replaced",
    "partial": "for merge: write the rows that are done, although others are missing",
}


def run(words: list[str]) -> int:
    """Answer the rows that are left, or merge. Raises SlurmRlhfError."""
    if words[:1] == ["merge"]:
        return _merge(words[1:])
    arguments = parse(words, USAGE)
    refuse_many_processes("generate")
    config = configured(arguments)
    from slurm_rlhf.generate.job import engines_everywhere, generate, prepare

    shard, source = prepare(config, os.environ)
    ranks = engines_everywhere(
        nodes_here(os.environ), config.vllm.tensor_parallel_size, config.generate.engines_per_node
    )
    directory = shard.directory(Path(config.run_dir))
    places = [("generate.dataset", config.generate.dataset)]
    with engine_launcher(config, directory, ranks, places) as launcher:
        return generate(config, shard, source, ranks, launcher)


def refuse_many_processes(command: str) -> None:
    """Raise ConfigError if MPI has started several of this process."""
    if launched(os.environ) is not None:
        raise ConfigError(
            "this process is one of several that mpirun or srun --mpi started, and each would answer all rows: start "
            f"`slurm-rlhf {command}` once, it starts the engines on all nodes itself"
        )


@contextmanager
def engine_launcher(config: Config, directory: Path, ranks: RankMap, places: Places) -> Iterator[Launcher]:
    """Examine the nodes, and yield the launcher of their engines. Raises PlacementError if they cannot start there."""
    directory.mkdir(parents=True, exist_ok=True)
    with steps_of(config, directory) as steps:
        if config.preflight == OFF:
            begin(steps)
        else:
            report = _look(config, directory, ranks, places, steps)
            report.require()
            for note in report.notes():
                print(printable(note), flush=True)
        yield launcher_on(directory, ranks, {}, steps)


def _look(config: Config, directory: Path, ranks: RankMap, places: Places, steps: AgentSteps | None) -> Report:
    """Examine each node by itself: engines do not talk to each other, so links between nodes do not matter."""
    needs = Needs(
        run_dir=str(directory),
        wanted=Wanted.by(ranks, config),
        ranks_on={share.node: len(share.ranks) for share in ranks.roles[ROLLOUT]},
        places=tuple(places),
        granted_by="start it where nvidia-smi shows GPUs" if steps is None else "ask for them with --gpus-per-node",
        lock=lock_problem(directory),
    )
    slurm = None if steps is None else steps.slurm
    asked = replace(question(config, ranks, needs, ranks.used_nodes, slurm), measure=False)
    return look_here(asked, os.environ) if steps is None else Examination(asked, steps).run().report


def _merge(words: list[str]) -> int:
    given, rest = take_options(words, OPTIONS, USAGE, ("partial",))
    if len(rest) != 1:
        raise ConfigError(f"merge takes one run directory\n{USAGE}")
    from slurm_rlhf.generate.merge import merge

    merged = merge(Path(rest[0]), Path(given["output"]) if "output" in given else None, "partial" in given)
    print(f"{merged.lines} lines of {merged.shards} {'shard' if merged.shards == 1 else 'shards'} in {merged.path}")
    return 0


EVAL_USAGE = "usage: slurm-rlhf eval FILE.toml [FILE.toml ...] --model=DIR [--output=DIR] [--KEY=VALUE ...]"
EVAL_OPTIONS = {
    "model": "what to evaluate: a Hugging Face directory, a run directory (its final model, else its newest "
    "checkpoint), or a checkpoint of a run",
    "output": "directory for responses and report [eval/<name of the model> in the run of the model, else in run_dir]",
}


def run_eval(words: list[str]) -> int:
    """Answer and score the prompts that are left, and print the report. Raises SlurmRlhfError."""
    given, rest = take_options(words, EVAL_OPTIONS, EVAL_USAGE, strict=False)
    options = {name: Path(os.path.abspath(Path(path).expanduser())) for name, path in given.items()}
    arguments = parse(rest, EVAL_USAGE)
    refuse_many_processes("eval")
    model = options.get("model")
    if model is None:
        raise ConfigError(f"--model is missing: name the model, run or checkpoint to evaluate\n{EVAL_USAGE}")
    config = configured(arguments)
    from slurm_rlhf.eval.report import report_text
    from slurm_rlhf.generate.eval_job import EvalJob
    from slurm_rlhf.generate.job import engines_everywhere

    job = EvalJob.prepare(config, model, options.get("output"))
    for one in job.sets:
        if one.prompts.dropped:
            print(f"evaluation {one.settings.name}: {one.prompts.dropped} prompts are too long and are dropped")
    per_node = config.generate.engines_per_node
    ranks = engines_everywhere(nodes_here(os.environ), config.vllm.tensor_parallel_size, per_node)
    places = [(f"eval.datasets, {one.settings.name}", one.settings.path) for one in job.sets]
    with engine_launcher(config, job.root, ranks, places) as launcher:
        code = job.run(ranks, launcher)
    if code:
        return code
    print(f"\n{report_text(job.report().reports)}\n\nreport: {job.root / 'eval.json'}", flush=True)
    return 0


COMMANDS = {
    "generate": Command(
        USAGE,
        "Answers each row of generate.dataset with engines on every GPU of the allocation, or of this machine, and "
        "appends a line to output.jsonl in run_dir for each response as it is finished. Started again, it goes on with "
        "the rows that are missing. A task of a job array (--array=0-9) answers its part; `merge` puts the parts "
        "together in the order of the rows.",
        run,
        OPTIONS,
        ["generate", "run_dir", "preflight", "data", "rollout", "vllm", "reward", *SETTINGS],
    ),
    "eval": Command(
        EVAL_USAGE,
        "Evaluates a model on eval.datasets (or eval.dataset) with engines on every GPU of the allocation, or of this "
        "machine: samples, scores with the reward function, and prints pass@k, majority votes and intervals, by source "
        "and by length. The figures are in eval.json, all responses in eval.jsonl. Started again, it goes on with the "
        "prompts that are missing.",
        run_eval,
        EVAL_OPTIONS,
        ["eval", "run_dir", "data", "rollout", "vllm", "reward", *SETTINGS],
    ),
}
