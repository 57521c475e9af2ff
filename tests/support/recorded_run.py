"""A run directory as a run leaves it, written by what a run writes it with, in a moment: no process is started."""

from __future__ import annotations

import json
import math
import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

from slurm_rlhf.config.evaluation import EvalSettings
from slurm_rlhf.config.schema import Config
from slurm_rlhf.config.text import dump_toml
from slurm_rlhf.eval.report import ScoredResponse, report_of
from slurm_rlhf.observe.run_log import EventLog, Sample, append_line
from slurm_rlhf.observe.run_status import Summary, append_metrics
from slurm_rlhf.observe.timing import CallSpans, append_timeline
from slurm_rlhf.placement.rank_map import NodeShare, RankMap
from slurm_rlhf.placement.topology import Topology
from slurm_rlhf.run_directory import RunDirectory

BEGAN = 1_790_000_000.0
SPITE = "</script><script>alert('script')</script><img src=x onerror=\"alert('img')\"> & <b>bold</b> \u2028"
"""A response that would take over a page which does not escape it."""

RANKS = RankMap(
    Topology.uniform(["gpu001", "gpu002"], 8),
    {
        "actor": [NodeShare(f"gpu00{n + 1}", tuple(range(4)), tuple(range(4 * n, 4 * n + 4))) for n in range(2)],
        "critic": [NodeShare("gpu001", (4, 5), (0, 1))],
        "reference": [NodeShare("gpu002", (4, 5), (0, 1))],
        "rollout": [NodeShare(f"gpu00{n + 1}", (6, 7), (2 * n, 2 * n + 1), ((n, 0), (n, 1))) for n in range(2)],
    },
)


class Clock:
    """Says the time that it was given."""

    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def write_run(root: Path, steps: int = 30, seed: int = 1, **keys: Any) -> RunDirectory:
    """Write a run of two nodes that was requeued in the middle; `keys`: of `train`, changed in its configuration."""
    directory, draw = RunDirectory(root), random.Random(seed)
    directory.make()
    config = Config(run_dir=str(root))
    config.train.seed = seed
    for name, value in keys.items():
        setattr(config.train, name, value)
    directory.config.write_text(dump_toml(config))
    layout = {"ranks": RANKS.to_json(), "weight_transfer": {"backend": "nccl", "interface": "ib0"}}
    layout["memory"] = {"actor": {str(rank): {"used": 50 << 30, "total": 80 << 30} for rank in range(8)}}
    directory.layout.write_text(json.dumps(layout))
    clock = Clock(BEGAN)
    events, spans = EventLog(directory.events, clock), CallSpans(clock)
    events.append("start", 0, f"step 0 of {steps}")
    for step in range(1, steps + 1):
        _calls(spans, clock, draw)
        append_timeline(directory.timeline, spans.take().line(step))
        append_metrics(directory.metrics, step, _metrics(step, steps, draw))
        for place in range(2):
            append_line(directory.samples, asdict(sample(step, place, draw)))
        if step == steps // 2:
            events.append("checkpoint", step, "saved in 2.0 s")
            events.append("stop", step, f"stopped by SIGUSR1; saved at step {step}")
            events.append("requeue", step, "asks to go on later, because SIGUSR1")
            clock.now += 60
            events.append("resume", step, f"step {step}")
        if step == steps // 3:
            events.append("warning", step, "warning: engine 1 on gpu002 is far below its peers")
    events.append("finish", steps, f"{steps} steps")
    _evaluation(directory, steps)
    summary = Summary("finished", steps, steps, 0.4, 0.9, 0.4, 0.9, 9.0 * steps, 900.0, steps, RANKS.worlds, seed)
    summary.write(directory.summary)
    return directory


def _evaluation(directory: RunDirectory, steps: int) -> None:
    """Two evaluations of the run, and one of `slurm-rlhf eval`; the first failure of each holds HTML."""
    settings = EvalSettings("sums", "/d/sums.jsonl", 2, 0.7, 0, (1, 2), 1.0, "", "part", "input", "label", False)
    found = [
        ScoredResponse(
            dataset="sums",
            index=index,
            sample=number,
            source="large" if index % 2 else "small",
            prompt=f"{index}+1=",
            response=str(index + 1) if index % 3 else SPITE,
            label=str(index + 1),
            answer=str(index + 1) if index % 3 else SPITE,
            score=float(index % 3 > 0),
            reward=0.0,
            prompt_tokens=3 + index,
            response_tokens=2 + index,
            finish_reason="stop",
        )
        for index in range(12)
        for number in range(2)
    ]
    figures = {"eval": 2 / 3, "datasets": [asdict(report_of(settings, found, 1))]}
    for name in (f"step_{steps // 2:06d}.json", f"step_{steps:06d}.json", "mine/eval.json"):
        path = directory.evaluations / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(figures))


def _calls(spans: CallSpans, clock: Clock, draw: random.Random) -> None:
    """Two engines sample, one slower; then the trainers compute; then the weights go."""
    for phase, calls in (
        ("rollout", [("rollout", 0, "generate", 3.0), ("rollout", 2, "generate", 4.0 + draw.random())]),
        ("forward", [*(("actor", rank, "logprobs", 0.8) for rank in range(8)), ("reference", 0, "logprobs", 1.0)]),
        ("update", [*(("actor", rank, "train_step", 2.5) for rank in range(8)), ("critic", 0, "train_step", 2.9)]),
        (
            "sync",
            [("actor", 0, "sync_push", 0.5), ("rollout", 0, "sync_receive", 0.5), ("rollout", 2, "sync_receive", 0.5)],
        ),
    ):
        spans.phase(phase)
        begun = [(length, spans.began(role, rank, name)) for role, rank, name, length in calls]
        began = clock.now
        for length, ended in sorted(begun, key=lambda each: each[0]):
            clock.now = began + length
            ended()
    spans.phase("")


def _metrics(step: int, steps: int, draw: random.Random) -> dict[str, float]:
    def noisy(value: float) -> float:
        return value * (1 + 0.1 * draw.uniform(-1, 1))

    reward = noisy(0.4 + 0.5 * step / steps)
    found = {
        "reward": reward,
        "reward_std": noisy(0.3),
        "reward_min": 0.0,
        "reward_max": 1.0,
        "accuracy": reward,
        "kl": noisy(0.02 * step),
        "entropy": noisy(0.5 * math.exp(-step / steps)),
        "response_length": noisy(120.0),
        "response_tokens": noisy(61440.0),
        "truncated": noisy(0.05),
        "clip_fraction": noisy(0.1),
        "rollout_logprob_diff": noisy(1e-6),
        "rollout_logprob_diff_max": noisy(3e-4),
        "staleness_max": 1.0,
        "stale_tokens": noisy(0.3),
        "correction/ess": noisy(0.9),
        "perf/engine/0/tokens_per_s": noisy(5000.0),
        "perf/engine/1/tokens_per_s": noisy(2100.0),
        "perf/tokens_per_s": noisy(5200.0),
        "perf/sync_bytes": 15.2e9,
        "perf/sync_link_share": noisy(0.6),
        "time/rollout": 4.5,
        "time/forward": 1.0,
        "time/update": 2.9,
        "time/sync": 0.5,
        "time/sync_transfer": 0.45,
        "time/step": 9.0,
    }
    score = noisy(0.4 + 0.5 * step / steps)
    return found | ({"eval": score, "eval/sums/mean": score} if step % 5 == 0 else {})


def sample(step: int, place: int, draw: random.Random) -> Sample:
    """A response; the first one of the first step holds HTML that must not be run."""
    tokens = [SPITE] if (step, place) == (1, 0) else ["The ", "answer ", "is ", str(step + place), ".", "<eos>"]
    logprobs = [-round(3 * draw.random(), 4) for _ in tokens]
    return Sample(
        step=step,
        prompt_index=7 * place,
        sample=place,
        prompt=f"What is {step} + {place}?",
        response="".join(token for token in tokens if token != "<eos>"),
        label=str(step + place),
        reward=draw.random(),
        score=float(place),
        advantage=draw.uniform(-1, 1),
        finish_reason="stop",
        engine=place,
        version=step - 1,
        tokens=tokens,
        logprobs=logprobs,
        actor_logprobs=[value + 0.01 * draw.random() for value in logprobs],
        observed=[2, 4] if place else [],
    )
