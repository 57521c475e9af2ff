"""Put a job together: its engines, its directory, its model and the rows that are left; then run it."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from slurm_rlhf.cluster.resources import node_name
from slurm_rlhf.config.check import check_generate
from slurm_rlhf.config.roles import ROLLOUT
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import PlacementError
from slurm_rlhf.generate.answers import PendingRows, Scores
from slurm_rlhf.generate.identity import claim, identity_of
from slurm_rlhf.generate.job import Opened, answer_rows
from slurm_rlhf.generate.model_source import Source, check_model, find_source, provide
from slurm_rlhf.generate.output import OUTPUT, OutputFile
from slurm_rlhf.generate.progress import JobProgress
from slurm_rlhf.generate.prompts import PromptRows
from slurm_rlhf.generate.shards import RowShard, shard_here
from slurm_rlhf.nodes.launcher import Launcher
from slurm_rlhf.placement.rank_map import NodeShare, RankMap
from slurm_rlhf.placement.topology import CPU, Node, Topology
from slurm_rlhf.run_directory import RunDirectory
from slurm_rlhf.sampling.batches import sampling_of


def engines_everywhere(topology: Topology, tp: int, per_node: int = 0) -> RankMap:
    """Put `per_node` engines of `tp` neighbouring slots on each node; 0: as many as its GPUs hold.

    Nodes without GPUs have as many process slots as that takes, for one engine where `per_node` is 0. Raises
    PlacementError where a node holds fewer engines than were asked for, or none holds one.
    """
    if topology.accelerator == CPU:
        slots = (per_node or 1) * tp
        topology = Topology(tuple(Node(node.name, slots, node.cpus) for node in topology.nodes), CPU)
    shares: list[NodeShare] = []
    engines = 0
    for node in topology.nodes:
        count = node.gpus // tp
        if per_node > count:
            raise PlacementError(
                f"generate.engines_per_node = {per_node} engines of vllm.tensor_parallel_size = {tp} need "
                f"{per_node * tp} GPUs, and {node.name} has {node.gpus}: lower one of them, or set "
                "generate.engines_per_node = 0 for as many as fit"
            )
        count = per_node or count
        if count:
            slots = count * tp
            first = engines * tp
            places = tuple((engines + slot // tp, slot % tp) for slot in range(slots))
            shares.append(NodeShare(node.name, tuple(range(slots)), tuple(range(first, first + slots)), places))
            engines += count
    if not shares:
        most = max(node.gpus for node in topology.nodes)
        raise PlacementError(
            f"vllm.tensor_parallel_size = {tp}, and the largest node has {most} GPUs: an engine does not leave its "
            f"node. Use at most {most}, or ask for more GPUs with --gpus-per-node"
        )
    return RankMap(topology, {ROLLOUT: shares})


def prepare(config: Config, environ: Mapping[str, str]) -> tuple[RowShard, Source]:
    """Check all that is known before anything is written. Raises UserError."""
    check_generate(config)
    root = Path(config.run_dir)
    shard = shard_here(root, config.generate.num_shards, environ)
    source = find_source(config, root)
    check_model(config, source.base or source.model)
    return shard, source


def engine_config(config: Config, model: Path, ranks: RankMap, directory: Path) -> Config:
    """Return the configuration that the engines read, of a rollout role without trainers."""
    made = copy.deepcopy(config)
    made.run_dir = str(directory)
    made.actor.model_name_or_path = str(model)
    made.vllm = replace(
        made.vllm,
        num_engines=len(ranks.tp_groups),
        num_nodes=len(ranks.roles[ROLLOUT]),
        sync_mode="drain",
    )
    made.train.colocate_all = made.ds.enable_sleep = False
    return made


def generate(config: Config, shard: RowShard, source: Source, ranks: RankMap, launcher: Launcher) -> int:
    """Answer the rows of `shard` that are left, and return the exit code. Raises SlurmRlhfError."""
    began = time.monotonic()
    root = shard.directory(Path(config.run_dir))
    made = engine_config(config, source.model, ranks, root)
    return answer_rows(made, root, ranks, launcher, partial(_open, config, shard, source, ranks, began))


def _open(
    config: Config, shard: RowShard, source: Source, ranks: RankMap, began: float, directory: RunDirectory
) -> Opened:
    """Open the output of a directory that only this process uses, and find the rows that are left."""
    scores = Scores.of(config, directory.reward_log)
    model = provide(source, print, directory.role_log("model", node_name(), 0))
    rows = PromptRows.read(config, model)
    claim(directory.root, identity_of(config, model, shard, len(rows)))
    output = OutputFile(directory.root / OUTPUT)
    n = config.rollout.n_samples_per_prompt
    own = shard.rows(len(rows))
    left = [row for row in own if not output.counts.complete(row, n)]
    pending = PendingRows.of(
        rows.prompts(left),
        sampling=sampling_of(config),
        seed=config.train.seed,
        width=config.vllm.max_num_seqs,
        scores=scores,
        logprobs=config.generate.logprobs,
        written=output.counts.done,
    )
    groups = {group.engine: group for group in ranks.tp_groups}
    progress = JobProgress(len(own) * n, groups, began, len(output.counts.done))
    part = f", part {shard.index} of {shard.count}" if shard.count > 1 else ""
    done = f"; {progress.before} are there from before" if progress.before else ""
    print(f"run directory {directory.root}: {progress.total} responses to {len(own)} rows{part}{done}", flush=True)
    return output, pending, progress
