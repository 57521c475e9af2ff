"""Run `slurm-rlhf generate`: answer the rows of a file, and put the outputs of a job array together."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from slurm_rlhf.cli.main import Command, parse
from slurm_rlhf.cli.train import given_twice
from slurm_rlhf.cluster.processes import attach_line
from slurm_rlhf.cluster.resources import nodes_here
from slurm_rlhf.cluster.slurm_environment import read_slurm
from slurm_rlhf.config.load import load_config
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import ConfigError
from slurm_rlhf.launch.engine_launcher import EngineLauncher, LocalEngines, SlurmEngines
from slurm_rlhf.launch.mpi.assignment import launched
from slurm_rlhf.placement.rank_map import RankMap

USAGE = (
    "usage: slurm-rlhf generate FILE.toml [FILE.toml ...] [--KEY=VALUE ...]\n"
    "       slurm-rlhf generate merge RUN_DIR [--output FILE] [--partial]"
)
OPTIONS = {
    "output": "of merge: the file to write; merged.jsonl in RUN_DIR without it. A file that is there is not replaced",
    "partial": "of merge: write what there is, although rows are missing",
}


def run(words: list[str]) -> int:
    """Answer the rows that are left, or merge. Raises SlurmRlhfError."""
    if words[:1] == ["merge"]:
        return _merge(words[1:])
    arguments = parse(words, USAGE)
    if launched(os.environ) is not None:
        raise ConfigError(
            "this process is one of several that mpirun or srun --mpi started, and each would answer all rows: start "
            "`slurm-rlhf generate` once, it starts the engines on all nodes itself"
        )
    config = load_config(arguments.files, arguments.overrides)
    for note in given_twice(arguments.overrides):
        print(note, flush=True)
    from slurm_rlhf.generation.layout import engines_everywhere
    from slurm_rlhf.generation.start import generate, prepare

    shard, source = prepare(config, os.environ)
    ranks = engines_everywhere(
        nodes_here(os.environ), config.vllm.tensor_parallel_size, config.generate.engines_per_node
    )
    directory = shard.directory(Path(config.run_dir))
    return generate(config, shard, source, ranks, _launcher(config, directory, ranks))


def _launcher(config: Config, directory: Path, ranks: RankMap) -> EngineLauncher:
    """Check the nodes and make the launcher of their engines."""
    from slurm_rlhf.launch.accelerators import Wanted
    from slurm_rlhf.launch.preflight import check_here, check_nodes

    slurm, wanted = read_slurm(os.environ), Wanted.by(ranks, config)
    if slurm is None:
        _tell(check_here(wanted, os.environ))
        return LocalEngines(directory, ranks)
    from slurm_rlhf.launch.slurm import used_nodes
    from slurm_rlhf.launch.srun import container_of

    nodes, container = used_nodes(ranks), container_of(config)
    gpus = [ranks.topology.node(node).gpus for node in nodes] if wanted.slots else []
    _tell(check_nodes(directory, nodes, container, wanted, gpus))
    print(f"job {slurm.job_id} on {', '.join(nodes[:8])}{' ...' if len(nodes) > 8 else ''}")
    print(f"to look inside: {attach_line(str(slurm.job_id), nodes[0])}", flush=True)
    return SlurmEngines(directory, ranks, slurm, container)


def _tell(notes: Sequence[str]) -> None:
    for note in notes:
        print(note, flush=True)


def _merge(words: list[str]) -> int:
    partial = "--partial" in words
    rest = [word for word in words if word != "--partial"]
    out: Path | None = None
    for place, word in enumerate(rest):
        if word == "--output" and place + 1 < len(rest):
            out, rest = Path(rest[place + 1]), rest[:place] + rest[place + 2 :]
            break
        if word.startswith("--output="):
            out, rest = Path(word.partition("=")[2]), rest[:place] + rest[place + 1 :]
            break
    if len(rest) != 1 or rest[0].startswith("-"):
        raise ConfigError(f"merge takes one run directory\n{USAGE}")
    from slurm_rlhf.generation.merge import merge

    merged = merge(Path(rest[0]), out, partial)
    print(f"{merged.lines} lines of {merged.shards} {'shard' if merged.shards == 1 else 'shards'} in {merged.path}")
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
        ["generate", "run_dir", "data", "rollout", "vllm", "reward", "train", "ds", "logger", "timeout", "slurm"],
    ),
}
