"""Trainers under the self-check, with faults in them: run as a program, it writes what each case found.

Its arguments are the directory of the models and the file of the results.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
from steps import make_step
from training_ranks import make_config

from slurm_rlhf.algorithms.correction import mask_not_finite
from slurm_rlhf.config.rules import before_update
from slurm_rlhf.data.tokenizer import Tokenizer
from slurm_rlhf.records import Experience, Trajectory, VersionSpan, pack
from slurm_rlhf.run.experience import fill_passes
from slurm_rlhf.run.self_check import PromptFindings, SelfCheck
from slurm_rlhf.wire.calls import SelfCheckAnswer, TrainAnswer

CASES = ("sound", "garbled", "dropout", "batch mates", "old log-probs", "stale engine", "off")
BYPASS = ("bypass", "bypass, colder engine", "bypass, stale engine")
OF_THE_UPDATE = ("update", "pass", "update, colder", "update, stale engine", "update, off")
"""Cases whose old log-probs are of the update's own pass, and one, `pass`, which is alike but for them."""
NOT_FINITE = {"a NaN": 1, "NaNs": 5, "later NaNs": 5, "a later NaN": 1}
"""Case -> how many of the engine's log-probs, of some 160, are NaN or infinite."""
WEIGHTS = {"weights of 1": 1.0, "weights of 0": 0.0}
RESPONSES = 12


class Here:
    """A role of one rank in this process, in place of `wire.handles.RoleHandle`: its calls are answered at once."""

    world = 1

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.layout = trainer, trainer.layout

    def start_each(self, method: Any, batches: list[Any], /) -> list[Future[Any]]:
        (batch,), name = batches, method.__name__
        arguments = {name: getattr(batch, name) for name in batch.__struct_fields__ if name != "experience"}
        found, answer = getattr(self.trainer, name)(batch.experience, **arguments), Future[Any]()
        if name == "train_step":
            answer.set_result(TrainAnswer(found, getattr(self.trainer, "used_logprobs", None)))
        else:
            answer.set_result(SelfCheckAnswer(**found) if name == "self_check" else found.get(name, found))
        return [answer]


class Bench:
    """An actor, a critic and a frozen policy in the engine's place, which samples nothing: its tokens are given."""

    def __init__(self, model: Path, **train: Any) -> None:
        from slurm_rlhf.algorithms.losses import KLController
        from slurm_rlhf.trainer.frozen import FrozenPolicy
        from slurm_rlhf.trainer.trainers import PolicyTrainer, ValueTrainer

        self.config = make_config(model)
        self.config.reward.remote_url = "reward.py"
        self.config.actor.max_norm, self.config.actor.learning_rate = 1.0, 1e-3
        self.config.actor.lr_scheduler = "constant"
        self.config.actor.lr_warmup_ratio = 0.0
        self.config.train.batch_size, self.config.train.max_tokens_per_gpu = RESPONSES, 100
        self.config.rollout.batch_size = RESPONSES
        for name, value in train.items():
            setattr(self.config.train, name, value)
        self.actor, self.engine = PolicyTrainer(self.config, 10), FrozenPolicy(self.config)
        roles: dict[str, Any] = {"actor": Here(self.actor), "critic": Here(ValueTrainer(self.config, 10))}
        self.step = make_step(self.config, roles, kl=KLController(0.0, 0.0, 1))
        self.notes: list[str] = []
        self.spoilt: dict[int, int] = {}  # step -> log-probs of the engine that are no numbers
        self.weight: float | None = None  # a correction gives it to every token
        self.tokenizer = Tokenizer.load(model)
        self.garbled = ""  # the reward gets it behind the text of each response
        findings = PromptFindings({"prompts_dropped": 0.25}, "the chat template ends an answer by nothing")
        self.check = SelfCheck(self.config, roles["actor"], self.notes.append, findings, {}, self.tokenizer)

    def trajectories(self, version: int) -> list[Trajectory]:
        """Prompts and responses of unlike lengths, with the log-probs that the frozen policy gives them."""
        rng = np.random.default_rng(version)
        found = []
        for number in range(RESPONSES):
            prompt, response = (rng.integers(2, 69, size).astype(np.int32) for size in rng.integers(3, 24, 2))
            mask, engine = np.ones(len(response), dtype=np.bool_), number % 2
            span = [VersionSpan(0, len(response), version)]
            text = self.tokenizer.response_text(prompt.tolist(), response.tolist()) + self.garbled
            args = (response, np.zeros(len(response), np.float32), mask, "stop", text, span, engine)
            found.append(Trajectory(number, 0, prompt, *args))
        exp = pack(found, [0.0] * RESPONSES)
        logprobs = self.engine.logprobs(exp, [[row] for row in range(RESPONSES)])["logprobs"]
        for trajectory, start, end in zip(found, exp.action_offsets[:-1], exp.action_offsets[1:], strict=True):
            trajectory.rollout_logprobs = logprobs[start:end]
        return found

    def train(self, number: int) -> dict[str, float]:
        """Do what `TrainingStep.run` does; answer the metrics of the update. Raises SelfCheckError."""
        found = self.trajectories(number - 1)
        exp = pack(found, [float(t.prompt % 3) for t in found])
        at = np.flatnonzero(exp.action_mask)[:: len(exp.action_mask) // 6][: self.spoilt.get(number, 0)]
        exp.columns["rollout_logprobs"][at] = np.resize([np.nan, np.inf, -np.inf], len(at))
        given = {"reward_clipped": 0.0, "reward_constant": 0.0, "truncated": 0.0}
        given["correction/not_finite"] = float(mask_not_finite(exp))
        fill_passes(self.config, self.step.roles, exp)
        if before_update(self.config):
            given["rollout_logprob_diff"] = self.drift(exp)
        self.check.before_update(number, found, exp, given, number - 1)
        if self.weight is not None:
            exp.columns["correction"] = np.full_like(exp.columns["values"], self.weight)
        exp.columns["advantages"] = exp.columns["returns"] = np.ones_like(exp.columns["values"])
        metrics = self.step.update(number, found, exp, {"kl": 0.0}, number - 1)
        self.check.after_update(number, exp, metrics)
        return metrics

    def drift(self, exp: Experience) -> float:
        """Mean distance of the engine's log-probs from the actor's."""
        return float(np.abs(exp.columns["rollout_logprobs"] - exp.columns["logprobs"])[exp.action_mask].mean())


def functional_dropout(bench: Bench) -> None:
    """OPT's own dropout, a number on each layer, as its config.json has it."""
    for layer in bench.actor.backend.module.model.model.decoder.layers:
        layer.dropout = 0.1


def dynamic_frequencies(bench: Bench) -> None:
    """Rotary frequencies that transformers computes anew for the longest sequence of each batch."""
    from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding

    model = bench.actor.backend.module.model
    config = copy.deepcopy(model.config)
    config.max_position_embeddings = 16
    config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
    model.model.rotary_emb = Qwen2RotaryEmbedding(config)


def another_temperature(bench: Bench) -> None:
    """Old log-probs are taken at another temperature than the new ones."""
    logprobs = bench.actor.logprobs

    def colder(exp: Experience, micro: list[list[int]]) -> Any:
        temperature = bench.config.rollout.temperature
        bench.config.rollout.temperature = 0.95 * temperature
        try:
            return logprobs(exp, micro)
        finally:
            bench.config.rollout.temperature = temperature

    bench.actor.logprobs = colder  # type: ignore[method-assign]
    bench.check._begun = True  # the engine would be found to differ first
    bench.check.config.train.self_check_stop = 0.0


def colder_update(bench: Bench) -> None:
    """The update's pass is made at another temperature."""
    loss = bench.actor._loss

    def colder(part: Experience, denominator: float) -> Any:
        bench.config.rollout.temperature *= 0.95
        try:
            return loss(part, denominator)
        finally:
            bench.config.rollout.temperature /= 0.95

    bench.actor._loss = colder  # type: ignore[method-assign]


def colder_engine(bench: Bench) -> None:
    """The engine's log-probs are taken at another temperature."""
    bench.engine.temperature *= 0.95


def run_case(case: str, models: Path) -> dict[str, Any]:
    import torch

    from slurm_rlhf.errors import SelfCheckError

    faults: dict[str, Callable[[Bench], None]] = {
        "dropout": functional_dropout,
        "batch mates": dynamic_frequencies,
        "old log-probs": another_temperature,
        "bypass, colder engine": colder_engine,
        "update, colder": colder_update,
    }
    bench = Bench(models / ("opt" if case == "dropout" else "qwen2"), self_check=not case.endswith("off"))
    if case in OF_THE_UPDATE:
        bench.config.algo.kl.init_coef = 0.0  # no reference needs them before
        bench.config.actor.old_logprobs = "pass" if case == "pass" else "auto"
    bench.config.algo.correction.bypass = case in BYPASS
    bench.weight = WEIGHTS.get(case)
    bench.garbled = "\u0120" if case == "garbled" else ""
    bench.spoilt = {1: NOT_FINITE.get(case, 0)}
    bench.check._begun = "later" in case
    if case in faults:
        faults[case](bench)
    twice = ("stale engine", "off", "bypass, stale engine", "update, stale engine")
    torch.manual_seed(3)
    error, metrics = "", []
    try:
        # The frozen policy never gets an update: in the second step it is an engine with old weights.
        for number in range(1, 3 if case in twice else 2):
            metrics.append(bench.train(number))
    except SelfCheckError as found:
        error = str(found)
    trained = bench.actor.backend.module.training
    return {
        "error": error,
        "notes": bench.notes,
        "figures": bench.check.figures,
        "metrics": metrics,
        "state": [trained, *torch.rand(2).tolist()],
    }


def main() -> None:
    models, out = Path(sys.argv[1]), Path(sys.argv[2])
    cases = (*CASES, *BYPASS, *OF_THE_UPDATE, *NOT_FINITE, *WEIGHTS)
    out.write_text(json.dumps({case: run_case(case, models) for case in cases}))


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
