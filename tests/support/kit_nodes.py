"""Checks of the acceptance kit over the nodes of an allocation: `sbatch sbatch/gpu_check.sh`."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path
from typing import Any

from kit import Finding, Place
from kit_bench import shown_sync
from kit_train import ppo_run

from slurm_rlhf.bench.sync import Spec, measure, parameters_of
from slurm_rlhf.cluster.network import address_towards
from slurm_rlhf.cluster.resources import node_name
from slurm_rlhf.cluster.slurm_environment import read_slurm
from slurm_rlhf.nodes.agent_steps import AgentSteps
from slurm_rlhf.nodes.examination import Question, examine_nodes
from slurm_rlhf.nodes.needs import Needs, Wanted
from slurm_rlhf.nodes.node_look import versions
from slurm_rlhf.nodes.srun import STEP_VARIABLES, Step, step_command
from slurm_rlhf.placement.rank_map import RankMap
from slurm_rlhf.placement.topology import Topology


def look(place: Place) -> Finding:
    """Check what every run checks first: one directory, the same packages, usable GPUs on all nodes."""
    gpus = len(place.gpus)
    nodes = tuple(place.nodes)
    ranks = RankMap(Topology.uniform(nodes, gpus), {})
    asked = Question(
        nodes=nodes,
        here=node_name(),
        needs=Needs(str(Path(place.scratch, "run")), Wanted(dict.fromkeys(nodes, gpus)), dict.fromkeys(nodes, gpus)),
        versions=versions(),
        ranks=ranks,
        place=lambda names: ranks,
    )
    slurm = read_slurm(os.environ)
    assert slurm is not None
    with closing(AgentSteps(Path(place.scratch, "run"), slurm, ranks.topology)) as steps:
        report, _ = examine_nodes(asked, steps)
    report.require()
    said = f"{len(place.nodes)} nodes share a directory, have the same packages and {len(place.gpus)} GPUs each"
    return Finding("; ".join([said, *report.notes()]), {"notes": report.notes()})


def sync(place: Place) -> Finding:
    """Actor ranks of ZeRO-3 on the first node, engine ranks on the second; the raw transfer is one link's."""
    first, second = place.nodes[:2]
    backend = place.backend("nccl")
    ranks = min(2, len(place.gpus))
    for name in STEP_VARIABLES:  # otherwise srun would read them as options of the ranks' steps
        os.environ.pop(name, None)
    spec = Spec(
        parameters_of(20 << 20 if place.rehearse else 2 << 30),
        [first] * ranks,
        [second] * ranks,
        zero=3,
        backend=backend,
        bucket_bytes=(4 if place.rehearse else 256) << 20,
        host=address_towards(second),
    )
    gpus = () if place.rehearse else place.gpus
    return shown_sync(measure(spec, gpus, lambda node: _step(node, len(place.gpus)), place.scratch))


def _step(node: str, gpus: int) -> list[str]:
    """A step of one task. Slurm sets CUDA_VISIBLE_DEVICES of a step anew, so the rank's own goes by another name."""
    words = step_command(Step("gpu_check", (node,), gpus=(gpus,)), [])
    outside = 'export KIT_DEVICES="$CUDA_VISIBLE_DEVICES"; exec "$@"'
    inside = 'export CUDA_VISIBLE_DEVICES="$KIT_DEVICES"; exec "$@"'
    return ["bash", "-c", outside, "step", *words, "bash", "-c", inside, "rank"]


def ppo(place: Place) -> Finding:
    """Actor ranks on all nodes, an engine on each; the run itself starts the steps."""
    nodes = len(place.nodes)
    words = [f"--actor.num_nodes={nodes}", f"--vllm.num_nodes={nodes}", f"--vllm.num_engines={nodes}"]
    words += ["--algo.kl.init_coef=0", "--vllm.enforce_eager=true"]
    words += [f"--rollout.batch_size={8 * nodes}", f"--train.batch_size={16 * nodes}"]
    if len(place.gpus) < 3:
        words += ["--train.colocate_all=true", f"--critic.num_nodes={nodes}", "--vllm.gpu_memory_utilization=0.3"]
    backend: Any = "ipc" if len(place.gpus) < 3 else place.backend("nccl")
    finding, _ = ppo_run(place, "bf16", backend, *words)
    return Finding(f"{nodes} nodes: {finding.figure}", finding.figures)
