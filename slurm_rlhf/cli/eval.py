"""Run `slurm-rlhf eval`: evaluate a model on the data sets of a configuration, with engines only."""

from __future__ import annotations

import os
from pathlib import Path

from slurm_rlhf.cli.generate import SETTINGS, engine_launcher, refuse_many_processes
from slurm_rlhf.cli.main import Command, parse
from slurm_rlhf.cli.train import given_twice
from slurm_rlhf.cluster.resources import nodes_here
from slurm_rlhf.config.load import load_config
from slurm_rlhf.errors import ConfigError

USAGE = "usage: slurm-rlhf eval FILE.toml [FILE.toml ...] --model=DIR [--output=DIR] [--KEY=VALUE ...]"
OPTIONS = {
    "model": "what to evaluate: a Hugging Face directory, a run directory (its final model, else its newest "
    "checkpoint), or a checkpoint of a run, for instance the best one",
    "output": "where responses and report go; eval/<name of the model> in run_dir without it",
}


def run(words: list[str]) -> int:
    """Answer and score the prompts that are left, and print the report. Raises SlurmRlhfError."""
    options, rest = take_paths(words)
    arguments = parse(rest, USAGE)
    refuse_many_processes("eval")
    model = options.get("model")
    if model is None:
        raise ConfigError(f"--model is missing: name the model, run or checkpoint to evaluate\n{USAGE}")
    config = load_config(arguments.files, arguments.overrides)
    for note in given_twice(arguments.overrides):
        print(note, flush=True)
    from slurm_rlhf.evaluation.words import report_text
    from slurm_rlhf.generation.eval_job import EvalJob
    from slurm_rlhf.generation.layout import engines_everywhere

    job = EvalJob.prepare(config, model, options.get("output"))
    for one in job.sets:
        if one.prompts.dropped:
            print(f"evaluation {one.settings.name}: {one.prompts.dropped} prompts are too long and are dropped")
    per_node = config.generate.engines_per_node
    ranks = engines_everywhere(nodes_here(os.environ), config.vllm.tensor_parallel_size, per_node)
    places = [(f"eval.datasets, {one.settings.name}", one.settings.path) for one in job.sets]
    code = job.run(ranks, engine_launcher(config, job.root, ranks, places))
    if code:
        return code
    print(f"\n{report_text(job.report().reports)}\n\nreport: {job.root / 'eval.json'}", flush=True)
    return 0


def take_paths(words: list[str]) -> tuple[dict[str, Path], list[str]]:
    """Split the options of this command, `--model PATH` or `--model=PATH`, from its other words. Raises ConfigError."""
    found: dict[str, Path] = {}
    rest: list[str] = []
    left = iter(words)
    for word in left:
        name, equals, value = word.partition("=")
        if name.removeprefix("--") not in OPTIONS or not name.startswith("--"):
            rest.append(word)
            continue
        path = value if equals else next(left, "")
        if not path or (not equals and path.startswith("--")):
            raise ConfigError(f"{name} needs a path: {name}=DIR\n{USAGE}")
        found[name.removeprefix("--")] = Path(os.path.abspath(Path(path).expanduser()))
    return found, rest


COMMANDS = {
    "eval": Command(
        USAGE,
        "Evaluates a model on eval.datasets (or eval.dataset) with engines on every GPU of the allocation, or of this "
        "machine: samples, scores with the reward function, and prints pass@k, majority votes and intervals, by source "
        "and by length. The figures are in eval.json, all responses in eval.jsonl. Started again, it goes on with the "
        "prompts that are missing.",
        run,
        OPTIONS,
        ["eval", "run_dir", "data", "rollout", "vllm", "reward", *SETTINGS],
    ),
}
