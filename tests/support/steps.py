"""The controller's step and loop, for tests that give only the parts that they look at."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import fields, replace
from typing import Any

from slurm_rlhf.checkpoint.directory import CheckpointDir, failures
from slurm_rlhf.checkpoint.resume import latest, load_state
from slurm_rlhf.config.evaluation import data_sets
from slurm_rlhf.config.roles import algorithm_of
from slurm_rlhf.config.schema import Config
from slurm_rlhf.data.prompts import PromptSet
from slurm_rlhf.eval.sets import EvalSet, Evaluation, Sample
from slurm_rlhf.observe.timing import Phases
from slurm_rlhf.run.gpu_account import GpuAccount
from slurm_rlhf.run.loop import TrainingLoop
from slurm_rlhf.run.reporting import Reporting
from slurm_rlhf.run.run_state import RunCheckpoints, RunState, SaveCadence
from slurm_rlhf.run.step import TrainingStep
from slurm_rlhf.run_directory import RunDirectory
from slurm_rlhf.sampling.batches import Batch


class OnDemand:
    """Batches that a function of the test makes."""

    def __init__(self, take: Callable[[int], Batch]) -> None:
        self.take = take
        self.alone = nullcontext
        self.updated: Callable[[int], None] = lambda version: None
        self.close: Callable[[], None] = lambda: None


def make_step(
    config: Config, roles: Mapping[str, Any], kind: type[TrainingStep] = TrainingStep, **parts: Any
) -> TrainingStep:
    """Build a step with `parts`; what is not among them is None, and must not be used."""
    missing = {field.name: None for field in fields(TrainingStep) if field.init}
    given = {"config": config, "algorithm": algorithm_of(config), "roles": roles, "phases": Phases()}
    made: Any = {**missing, **given, **parts}
    return kind(**made)


def make_loop(
    step: TrainingStep,
    directory: RunDirectory,
    reporting: Reporting,
    resume: bool,
    eval_prompts: PromptSet | None = None,
    alongside: Sample | None = None,
    gpus: GpuAccount | None = None,
) -> TrainingLoop:
    """Build the loop around `step`, at the beginning or, with `resume`, at the newest checkpoint."""
    checkpoints = CheckpointDir(directory.root)
    checkpoint = latest(checkpoints.root) if resume else None
    state = RunState(**(load_state(checkpoint)["run"] if checkpoint else {"seed": 0}))
    cadence = SaveCadence(step.config.ckpt.save_steps, failures([], 1, 1.0), reporting.note)
    saves = RunCheckpoints(checkpoints, state, step, reporting.saved, cadence, time.monotonic(), gpus)
    evaluation = None
    if eval_prompts is not None:
        config = replace(step.config, eval=replace(step.config.eval, dataset="/data/sums.jsonl"))
        (settings,) = data_sets(config)
        sets = [EvalSet(settings, eval_prompts)]
        evaluation = Evaluation(config, sets, directory.evaluations, step.generate, step.reward, alongside)
    loop = TrainingLoop(step, evaluation, state, saves, reporting, directory.final)
    reporting.begin(state, step.total_steps, checkpoint)
    if checkpoint:
        saves.load(checkpoint, reporting.note)
    return loop
