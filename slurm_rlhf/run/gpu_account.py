"""Measures the GPUs of a run: kernels, memory, idle time, speed, and hours."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from slurm_rlhf.config.roles import ACTOR, CRITIC, REWARD, ROLES, has_engines, has_reference
from slurm_rlhf.config.rules import before_update
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import RunError
from slurm_rlhf.observe.timing import Slot, StepSpans
from slurm_rlhf.placement.gpus import find_gpu
from slurm_rlhf.placement.memory import Models, known_models
from slurm_rlhf.placement.model_shape import batch_flops, mfu
from slurm_rlhf.placement.rank_map import RankMap
from slurm_rlhf.placement.step_time import USUAL_LINKS
from slurm_rlhf.records import I32, Experience, SyncConnection
from slurm_rlhf.run.prediction import PhaseSeconds, Prediction, Speeds
from slurm_rlhf.weights.routes import cost_of, transfer_plan
from slurm_rlhf.wire.calls import DeviceReport, RankCalls
from slurm_rlhf.wire.handles import RoleHandle, gather

log = logging.getLogger(__name__)

EVERY = 20
"""Number of steps from one line on the console to the next."""

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class StepFlops:
    """Counts the model FLOPs of a training step: no recomputation of activations, no padding.

    Logits are counted for response tokens only. A prompt is sampled from once for all of its responses.
    """

    config: Config
    models: Models

    def update(self, experience: Experience, actor_trains: bool) -> float:
        """Count the training passes of actor and critic."""
        once = self._pass(CRITIC, experience.lengths, 0, backward=True)
        if actor_trains:
            once += self._pass(ACTOR, experience.lengths, int(experience.response_lens.sum()), backward=True)
        return self.config.train.max_epochs * once

    def others(self, experience: Experience) -> float:
        """Count sampling and all passes without gradients."""
        prompts, samples = experience.prompt_lens, self.config.rollout.n_samples_per_prompt
        again = self._pass(ACTOR, prompts, 0) - self._pass(ACTOR, prompts[::samples], 0)
        policy = self._pass(ACTOR, experience.lengths, int(experience.response_lens.sum()))
        passes = 1 + before_update(self.config) + has_reference(self.config)  # sampled, scored by actor and reference
        return passes * policy - again + sum(self._pass(role, experience.lengths, 0) for role in (CRITIC, REWARD))

    def _pass(self, role: str, lengths: I32, head_tokens: int, backward: bool = False) -> float:
        """Count a pass of a role's model over sequences, with logits for `head_tokens`; 0 if the role does not run."""
        if role not in self.models:
            return 0.0
        return batch_flops(self.models[role], [int(length) for length in lengths], backward, head_tokens)


@dataclass(slots=True, eq=False)
class GpuAccount:
    """Measures each step of a run on accelerators.

    Metrics: perf/gpu_idle, the share of accelerator-seconds of a step without a call in progress (`StepSpans.idle`);
    perf/gpu_idle_<role>, of that role's accelerators; perf/gpu_hours, of all that the roles hold, over all sessions;
    perf/mfu, model FLOPs of the whole step over the bf16 peak of all accelerators for all of its time; perf/mfu_update,
    those of actor's and critic's training over the peak of their accelerators for time/update. The two last are absent
    where the card or the model is not in the tables of `placement`.
    """

    config: Config
    ranks: RankMap
    handles: Mapping[str, RoleHandle[Any]]
    began: float  # time from which GPU-hours count, by `clock`
    way: Callable[[], SyncConnection | None]  # returns the connection by which weights go to the engines
    note: Callable[[str], None]  # informs the user
    clock: Callable[[], float] = time.monotonic
    _slots: dict[str, list[list[Slot]]] = field(init=False)
    _flops: StepFlops | None = field(init=False)
    _reports: dict[str, list[DeviceReport]] = field(default_factory=dict, init=False)
    _steps: int = field(default=0, init=False)
    _prediction: Prediction = field(init=False)
    _sums: dict[str, float] = field(init=False)  # over all sessions, as far as checkpoints know them

    def __post_init__(self) -> None:
        self._slots, models = slots_of(self.ranks), known_models(self.config)
        self._flops = StepFlops(self.config, models) if models else None
        self._prediction = Prediction(self.config)
        self._sums = dict.fromkeys(("gpu_s", "idle_s", "step_gpu_s", "flops", "peak_flops"), 0.0)

    def started(self) -> None:
        """Ask the ranks about their GPUs, and note them; all roles have started."""
        self._ask()
        if cards := self._cards():
            memory = ", ".join(f"{role} {gib:.1f}" for role, gib in self._memory().items())
            held = max(report.total for reports in self._reports.values() for report in reports) / GIB
            count = len(_distinct(self._slots))
            self.note(f"GPUs: {count} x {', '.join(cards)}; GiB in use after start, of {held:.1f}: {memory}")
            for card in cards:
                if not _peak(card):
                    self.note(f"no peak rate is known for {card}: no MFU")

    def step(
        self, number: int, experience: Experience, spans: StepSpans, timings: Mapping[str, float]
    ) -> dict[str, float]:
        """Return metrics of a step, and note the speed now and then; `timings` holds time/step and time/update."""
        seconds, idle = spans.seconds, spans.idle(self._slots)
        self._sums["idle_s"] += sum(idle.values())
        self._sums["step_gpu_s"] += seconds * len(idle)
        metrics = {"perf/gpu_idle": _share(sum(idle.values()), seconds * len(idle)), "perf/gpu_hours": self.hours()}
        for role, ranks in self._slots.items():
            own = {slot for of in ranks for slot in of}
            metrics[f"perf/gpu_idle_{role}"] = _share(sum(idle[slot] for slot in own), seconds * len(own))
        metrics |= self._speeds(number, experience, timings)
        self._prediction.step(experience, timings)
        if self._steps == 0:
            self._ask()  # ranks know their attention kernel after its first use
            self.note("attention: " + ", ".join(f"{role} {name}" for role, name in self.attention().items()))
            if way := self.transfer():
                self.note("weight transfer: " + " over ".join(way.values()))
        if self._steps % EVERY == 0:
            self.note(self.line(metrics))
        self._steps += 1
        return metrics

    def line(self, metrics: Mapping[str, float]) -> str:
        """Put the metrics of a step into a line for the console."""
        rates = [f"{what} {100 * metrics[name]:.1f} %" for name, what in _RATES if name in metrics]
        idle = {role: metrics[f"perf/gpu_idle_{role}"] for role in self._slots}
        roles = ", ".join(f"{role} {100 * share:.0f}" for role, share in idle.items())
        rates.append(f"idle {100 * metrics['perf/gpu_idle']:.0f} % ({roles})")
        return f"GPUs: {', '.join(rates)}; {metrics['perf/gpu_hours']:.2f} GPU-hours"

    def transfer(self) -> dict[str, str]:
        """Name the backend and the interface of the weight transfer, as its leader has them."""
        way = self.way()
        return {name: value for name in ("backend", "interface") if (value := getattr(way, name, ""))}

    def compared(self) -> dict[str, PhaseSeconds]:
        """Compare seconds of phases with their prediction; empty without engines, or for an unknown card or model."""
        card = find_gpu(cards[0]) if len(cards := self._cards()) == 1 else None
        if card is None or not card.bf16_tflops or self._flops is None or not has_engines(self.config):
            return {}
        self._prediction.models, self._prediction.speeds = self._flops.models, Speeds(card, USUAL_LINKS)
        if transfer := transfer_plan(self.config, self.ranks):
            self._prediction.sync_s = cost_of(transfer).seconds(USUAL_LINKS.network, USUAL_LINKS.inside)
        return self._prediction.compared()

    def hours(self) -> float:
        """Count the GPU-hours of the run so far."""
        return self._gpu_s() / 3600

    def attention(self) -> dict[str, str]:
        """Name the attention kernel that the first rank of each role uses; if not known yet, the configured one."""
        found = {role: reports[0].attention for role, reports in self._reports.items() if reports}
        return {role: name or self.config.ds.attn_implementation for role, name in found.items()}

    def summary(self) -> dict[str, Any]:
        """Return the part of summary.json about the GPUs."""
        sums = self._sums
        return {
            "count": len(_distinct(self._slots)),
            "devices": self._cards(),
            "hours": self.hours(),
            "idle_share": _share(sums["idle_s"], sums["step_gpu_s"]),
            "mfu": _share(sums["flops"], sums["peak_flops"]) if sums["peak_flops"] else None,
            "attention": self.attention(),
            "weight_transfer": self.transfer(),
            "memory_gib": self._memory(),
        }

    def state_dict(self) -> dict[str, float]:
        """Return the sums that a checkpoint keeps."""
        return {**self._sums, "gpu_s": self._gpu_s()}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on counting from the sums of a checkpoint."""
        self._sums |= {name: float(value) for name, value in state.items() if name in self._sums}

    def _gpu_s(self) -> float:
        return self._sums["gpu_s"] + len(_distinct(self._slots)) * (self.clock() - self.began)

    def _ask(self) -> None:
        """Ask every rank that takes calls, and engines that have started. A missing answer does not end the run."""
        try:
            for role, handle in self.handles.items():
                # Engines that take turns have all started before the first one is ready.
                ranks = handle.ready or range(handle.world)
                answers = gather([handle.call(rank, RankCalls.memory) for rank in ranks])
                self._reports[role] = [answer for answer in answers if answer.gpu]
        except RunError as error:
            log.warning("the ranks could not be asked about their GPUs: %s", error)

    def _cards(self) -> list[str]:
        """List the names of the GPUs, each once."""
        return sorted({report.gpu for reports in self._reports.values() for report in reports})

    def _memory(self) -> dict[str, float]:
        """Measure the GiB in use on the fullest GPU of each role, by all processes there."""
        return {
            role: max(report.used for report in reports) / GIB for role, reports in self._reports.items() if reports
        }

    def _speeds(self, number: int, experience: Experience, timings: Mapping[str, float]) -> dict[str, float]:
        cards_of = {role: [_peak(report.gpu) for report in self._reports.get(role, [])] for role in self._slots}
        peaks = {role: min(known, default=0.0) for role, known in cards_of.items()}
        if self._flops is None or not all(peaks.values()):
            return {}
        update = self._flops.update(experience, number > self.config.critic.freezing_steps)
        whole = update + self._flops.others(experience)
        cards = {slot: peaks[role] for role, ranks in self._slots.items() for of in ranks for slot in of}
        training = _distinct({role: of for role, of in self._slots.items() if ROLES[role].kind == "trained"})
        self._sums["flops"] += whole
        self._sums["peak_flops"] += 1e12 * sum(cards.values()) * timings["time/step"]
        return {
            "perf/mfu": mfu(whole, timings["time/step"], 1, sum(cards.values())),
            "perf/mfu_update": mfu(update, timings["time/update"], 1, sum(cards[slot] for slot in training)),
        }


_RATES = (("perf/mfu_update", "MFU in updates"), ("perf/mfu", "over the step"))


def slots_of(ranks: RankMap) -> dict[str, list[list[Slot]]]:
    """List the accelerators that a call to a rank sets to work: role -> rank -> accelerators."""
    found: dict[str, list[list[Slot]]] = {role: [[] for _ in range(ranks.world(role))] for role in ranks.roles}
    for role, shares in ranks.roles.items():
        for share in shares:
            for gpu, rank in zip(share.gpus, share.ranks, strict=True):
                found[role][rank] = [(share.node, gpu)]
    for group in ranks.tp_groups:
        found[group.role][group.ranks[0]] = [(group.node, gpu) for gpu in group.gpus]
    return found


def _distinct(slots: Mapping[str, list[list[Slot]]]) -> set[Slot]:
    return {slot for ranks in slots.values() for of in ranks for slot in of}


def _peak(card: str) -> float:
    """Look up the TFLOPs per second of a card in bf16; 0: not known."""
    gpu = find_gpu(card)
    return gpu.bf16_tflops if gpu else 0.0


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0
