"""A vLLM engine for one tiny model after the other: what it samples from the directory, and after an update.

Functions for `rollout_engine.EngineProcess`. The trainer's model lives in another process: where vLLM runs the classes
of transformers it patches them for good.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import rollout_engine

from slurm_rlhf.records import Sampling, Trajectory

SAMPLING = Sampling(max_new_tokens=24, temperature=0.9)


def sample(path: Path, update: Path) -> tuple[list[Trajectory], list[Trajectory]]:
    """Trajectories under the weights in directory `path`, and under those in the safetensors file `update`."""
    rollout_engine.start(path)
    before = rollout_engine.generate(rollout_engine.requests(SAMPLING, samples=2))
    rollout_engine.engine.load_weights(_stored(update), 1)
    after = rollout_engine.generate(rollout_engine.requests(SAMPLING, samples=2, version=1))
    rollout_engine.engine.close()
    rollout_engine.engine = None
    return before, after


def _stored(file: Path) -> Iterator[tuple[str, Any]]:
    from safetensors import safe_open

    with safe_open(file, framework="pt") as opened:
        for name in sorted(opened.keys()):
            yield name, opened.get_tensor(name)
