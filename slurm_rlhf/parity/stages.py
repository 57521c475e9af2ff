"""The stages of a comparison, each in a process of its own: sample, follow. Files lead from one to the other.

Engine and trainer need processes of their own, as in a run: where the engine has no class for an architecture it runs
that of transformers and changes it for the whole process. The memory of a GPU is free again, too, when a process has
ended.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from slurm_rlhf.cluster.processes import print_to
from slurm_rlhf.config.schema import Config
from slurm_rlhf.parity.subjects import Subject
from slurm_rlhf.parity.verdicts import ENGINE, PLAIN, PRECISIONS, TRAINER, Apart, differences
from slurm_rlhf.records import Experience
from slurm_rlhf.run_directory import write_atomically

ARRAYS = ("prompt_lens", "response_lens", "token_ids", "action_mask", "rewards")
"""Of an Experience, beside its columns."""


@dataclass(frozen=True, slots=True)
class Task:
    """Says what is compared, and where the stages leave their files."""

    subject: Subject
    max_len: int
    seed: int
    scratch: Path  # a directory of this task alone

    @property
    def log(self) -> Path:
        return self.scratch / "log"

    def sampled(self, precision: str) -> Path:
        """Return where `sample` leaves the tokens and their log-probs."""
        return self.scratch / f"{precision}.npz"

    def compared(self, precision: str) -> Path:
        """Return where `follow` leaves how far the sides are apart."""
        return self.scratch / f"{precision}.json"


def sample(task: Task, precision: str) -> None:
    """Have the engine sample. Raises ModelError."""
    _prepare()
    from slurm_rlhf.parity import sides

    config = sides.settings(task.subject.directory, PRECISIONS[precision], task.max_len)
    exp = sides.packed(sides.sample(config, task.seed))
    np.savez(
        task.sampled(precision), allow_pickle=False, **{name: getattr(exp, name) for name in ARRAYS}, **exp.columns
    )


def follow(task: Task, precision: str) -> None:
    """Compute the log-probs of what was sampled by trainer and transformers, and compare. Raises ModelError."""
    _prepare()
    from slurm_rlhf.parity import sides

    with np.load(task.sampled(precision), allow_pickle=False) as stored:
        arrays = dict(stored)
    engine = arrays.pop("rollout_logprobs")
    exp = Experience(**arrays)
    config = sides.settings(task.subject.directory, PRECISIONS[precision], task.max_len)
    apart = differences({ENGINE: engine, TRAINER: sides.trained(config, exp), PLAIN: sides.plain(config, exp)})
    found = {name: [pair.largest, pair.mean] for name, pair in apart.items()}
    write_atomically(task.compared(precision), json.dumps({"tokens": len(engine), "apart": found}))


def read_compared(task: Task, precision: str) -> tuple[int, dict[str, Apart]]:
    """Read what `follow` has left: the number of tokens, and how far each pair is apart."""
    found = json.loads(task.compared(precision).read_text(encoding="utf-8"))
    return found["tokens"], {name: Apart(*figures) for name, figures in found["apart"].items()}


# --- a stage's process ------------------------------------------------------------------------------------------------


def _prepare() -> None:
    """Set what the engine's library reads when it is imported, unless the process that this one was forked from has."""
    from slurm_rlhf.engine.engine import backend

    backend(Config()).prepare_environment()


def import_libraries() -> None:
    """Import what the stages need, for all processes that are forked from this one."""
    _prepare()
    from slurm_rlhf.engine.engine import backend
    from slurm_rlhf.trainer._transformers import import_modeling

    backend(Config()).import_library()
    import_modeling()
    import slurm_rlhf.parity.sides  # noqa: F401


@contextmanager
def printing_to(path: Path) -> Iterator[None]:
    """Send what this process prints inside the block to a file, libraries written in C included."""
    streams = (sys.stdout, sys.stderr)
    kept = [os.dup(stream.fileno()) for stream in streams]
    print_to(path)
    try:
        yield
    finally:
        for stream, descriptor in zip(streams, kept, strict=True):
            stream.flush()
            os.dup2(descriptor, stream.fileno())
            os.close(descriptor)
