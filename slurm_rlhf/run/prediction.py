"""Predicts the seconds of a run's phases, and compares them with the measured ones.

Predictions are those of `placement.step_time` for the lengths that the run has had. The speed of CPUs is measured
before the first step.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from slurm_rlhf.config.roles import ACTOR, ROLES, ROLLOUT
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import RunError
from slurm_rlhf.placement import step_time
from slurm_rlhf.placement.gpus import Gpu
from slurm_rlhf.placement.memory import Models, known_models
from slurm_rlhf.placement.model_shape import batch_flops
from slurm_rlhf.placement.rank_map import RankMap
from slurm_rlhf.records import I32, Experience
from slurm_rlhf.run.experience import one_at_a_time
from slurm_rlhf.wire.calls import EngineCalls, PassRequest, SamplingRequest, TrainerCalls
from slurm_rlhf.wire.handles import RoleHandle, gather, send_shards

MEASURED = {
    **{"sampling": "time/rollout", "forward": "time/forward", "update": "time/update"},
    **{"sync": "time/sync_transfer", "reward": "time/reward"},
}
"""Phase of a prediction -> the metric with its seconds."""

LAST = 16
"""Steps of a run that are compared, each by the lengths of its sequences."""


@dataclass(frozen=True, slots=True)
class PhaseSeconds:
    """Hold the seconds of a phase, medians of the last steps."""

    predicted: float | None  # None: the reward is a function, of which nothing is known
    measured: float


@dataclass(frozen=True, slots=True)
class Speeds:
    """Hold what is known of the hardware."""

    gpu: Gpu
    links: step_time.Links
    rates: step_time.Rates = step_time.RATES
    cores: step_time.Cores | None = None  # None: on GPUs


@dataclass(slots=True)
class Prediction:
    """Collects the lengths and seconds of the last steps of a run with engines."""

    config: Config
    models: Models | None = None  # None: a shape is not known, and nothing is compared
    speeds: Speeds | None = None
    sync_s: float | None = None  # seconds of a weight update; None: not known, and not compared
    _first: bool = field(default=True, init=False)  # True: at most the first step was noted
    _seconds: dict[str, deque[float]] = field(default_factory=dict, init=False)
    _lengths: deque[step_time.StepLengths] = field(default_factory=partial(deque, maxlen=LAST), init=False)

    def step(self, experience: Experience, timings: Mapping[str, float]) -> None:
        """Note a step; `timings` holds its phases, as `time/<phase>`.

        The first of several does not count: kernels are compiled in it.
        """
        if self._first and self._lengths:
            self._first = False
            self._lengths.clear()
            self._seconds.clear()
        responses, prompt = experience.response_lens.tolist(), round(float(experience.prompt_lens.mean()))
        self._lengths.append(step_time.StepLengths(responses, experience.lengths.tolist(), prompt))
        ahead = self.config.vllm.sync_mode == "inflight"  # then a step waits for what is left of sampling
        for phase, name in MEASURED.items():
            if name in timings and not (ahead and phase == "sampling"):
                self._seconds.setdefault(phase, deque(maxlen=LAST)).append(timings[name])

    def compared(self) -> dict[str, PhaseSeconds]:
        """Predict the phases, each with what was measured; empty before the first step."""
        known = self.speeds
        if not self._lengths or self.models is None or known is None:
            return {}
        sync_s, hardware = self.sync_s, (known.rates, known.cores)
        found = [
            step_time.predict(self.config, self.models, known.gpu, known.links, sync_s, step, *hardware).phases
            for step in self._lengths
        ]
        return {
            phase: PhaseSeconds(median(each[phase] for each in found) if phase in found[0] else None, median(seconds))
            for phase, seconds in self._seconds.items()
            if phase != "sync" or self.sync_s is not None
        }


def words(compared: Mapping[str, PhaseSeconds]) -> str:
    """Put predicted and measured seconds side by side; empty: nothing was compared."""
    pairs = [
        f"{phase} {'of a function, not predicted' if each.predicted is None else format(each.predicted, '.3g')}/"
        f"{each.measured:.3g}"
        for phase, each in compared.items()
    ]
    return f"seconds of a step, predicted/measured: {', '.join(pairs)}" if pairs else ""


ENOUGH = 1.2e10
"""FLOPs of one rank's pass from which on its rate is reliable: half a second. A few sequences may have more."""
LEAST = 256
"""Tokens of one rank's pass from which on its rate is reliable: with fewer, reading the weights takes the time."""
MOST = 6e10
"""Most FLOPs of one rank's pass: all measurements take 20 s at 30 GFLOP/s. Longer sequences are cut."""
TOKENS = 16
"""Most tokens of a response that an engine samples in a measurement."""


@dataclass
class Measurement:
    """Has idle roles and engines compute sequences of the length that is to be expected, first few, then more."""

    config: Config
    ranks: RankMap
    roles: Mapping[str, RoleHandle[Any]]
    engines: Sequence[int]  # those that have started, and are awake
    prompt: I32  # tokens of a typical one

    def __post_init__(self) -> None:
        models = known_models(self.config)
        if models is None:
            raise RunError("the shape of a model is not known")
        self.models = models
        self._trained = [role for role in self.roles if ROLES[role].kind == "trained"]
        nodes = {share.node for shares in self.ranks.roles.values() for share in shares}
        cores = sum(self.ranks.topology.node(node).cpus or len(os.sched_getaffinity(0)) for node in nodes)
        rivals = sum(self.ranks.world(role) for role in self.models if role != ROLLOUT)
        self._cores = step_time.Cores(cores, self.config.train.threads_per_rank or max(1, cores // rivals))
        self._response = max(1, round(step_time.MEAN * self.config.rollout.max_new_tokens))
        # Two sequences of 32 tokens still reach 3/4 of the rate of 256.
        while 2 * self._work(1).update_flops() > MOST and len(self.prompt) + self._response >= LEAST // 4:
            self.prompt, self._response = self.prompt[: -(-len(self.prompt) // 2)], -(-self._response // 2)

    def prediction(self, update: Callable[[], Mapping[str, float]]) -> Prediction:
        """Measure all, and `update`, which gives weights to the engines; raises RunError, also for a large model."""
        speeds = self.speeds()
        took = [seconds for _ in range(3) if (seconds := update().get(MEASURED["sync"]))]
        return Prediction(self.config, self.models, speeds, median(took) if took else None)

    def speeds(self) -> Speeds:
        """Measure. Raises RunError for a model that takes too long."""
        world, batch, of_one = self.roles[ACTOR].world, self.config.rollout.batch_size, self._work(1).update_flops()
        if 2 * of_one > MOST:
            raise RunError(f"two sequences take {2 * of_one:.1g} FLOPs of the actor, and at most {MOST:.0g} are tried")
        samples = self.config.rollout.n_samples_per_prompt
        length = len(self.prompt) + self._response
        room = self.config.train.max_tokens_per_gpu // length
        many = int(max(2, min(batch * samples / world, room, max(ENOUGH / of_one, LEAST / length), MOST / of_one)))
        self._pass(1, backward=True)  # not measured: it allocates memory and compiles kernels
        (forward, *_), (update, optimizer, link) = (self._pass(many, backward) for backward in (False, True))
        width = min(self.config.vllm.max_num_seqs, batch * samples // self.roles[ROLLOUT].world)
        most = max(2, min(width, int(ENOUGH / batch_flops(self.models[ROLLOUT], [len(self.prompt)], False, 0))))
        self._sampling(1)
        few, more = (
            sorted((self._sampling(count) for _ in range(3)), key=lambda probe: probe.seconds / probe.steps)[1]
            for count in (max(1, most // 4), most)
        )
        gpu, rates = step_time.measured(forward, update, (few, more), optimizer)
        return Speeds(gpu, step_time.Links(link or optimizer, link or optimizer), rates, self._cores)

    def _work(self, count: int) -> step_time.Work:
        """Describe what a rank of the actor has to do with so many sequences."""
        lengths = [len(self.prompt) + self._response] * count
        batch = step_time.StepLengths([self._response] * count, lengths, len(self.prompt))
        return step_time.Work(
            self.config, ACTOR, self.models[ACTOR], Gpu("CPU", 0, 0, 0, ""), step_time.Links(0, 0), batch
        )

    def _pass(self, count: int, backward: bool) -> tuple[step_time.Probe, float, float]:
        """Have each rank of the trained roles pass `count` sequences; return the actor's slowest pass and two rates."""
        answers = {}
        for role in self._trained:
            rows = count * self.roles[role].world
            prompts, responses = (np.full(rows, n, np.int32) for n in (len(self.prompt), self._response))
            tokens = np.resize(self.prompt, int(prompts.sum() + responses.sum()))
            actions = np.ones(int(responses.sum()), np.bool_)
            batch = Experience(prompts, responses, tokens, actions, np.zeros(rows, np.float32))
            request = partial(PassRequest, backward=backward)
            most = self.config.train.max_tokens_per_gpu
            answers[role] = send_shards(self.roles[role], TrainerCalls.measure, request, batch, most)[1]
            one_at_a_time(self.config, answers[role])
        found = gather([each for calls in answers.values() for each in calls])[: self.roles[ACTOR].world]
        work = self._work(count)
        flops = work.update_flops() if backward else work.flops()
        # Predictions divide the cores among the ranks. If more threads than cores took turns here, the clock counts
        # their waiting, too.
        at_once = [ACTOR] if self.config.train.colocate_all else self._trained
        threads = sum(self.roles[role].world for role in at_once) * self._cores.threads
        crowd = max(1.0, threads / self._cores.count)
        probe = step_time.Probe(flops, max(max(each.seconds / crowd, each.busy) for each in found))
        return probe, min(each.optimizer for each in found), min(each.link for each in found)

    def _sampling(self, count: int) -> step_time.Probe:
        """Have all engines sample `count` responses; return the work and seconds of the slowest."""
        request = SamplingRequest(self.prompt, count, min(TOKENS, self._response))
        loads = gather([self.roles[ROLLOUT].call(number, EngineCalls.measure, request) for number in self.engines])
        load, shape = max(loads, key=lambda each: each.busy_s), self.models[ROLLOUT]
        prefill = count * batch_flops(shape, [len(self.prompt)], backward=False, head_tokens=0)
        return step_time.Probe(prefill + 2.0 * shape.active * load.tokens, load.busy_s, load.steps)
