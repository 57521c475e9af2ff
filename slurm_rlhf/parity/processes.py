"""Compare models, each stage in a child process of its own and with a time limit per model. Files connect the stages.

Engine and trainer need processes of their own, as in a run: if the engine has no class for an architecture, it uses
that of transformers and changes it for the whole process. Also, only the end of a process frees all of its GPU memory.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from slurm_rlhf.cluster.processes import die_with_parent, exit_text, print_to
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import SlurmRlhfError
from slurm_rlhf.observe.log_tail import tail
from slurm_rlhf.parity.verdicts import (
    ENGINE,
    FAILED,
    PLAIN,
    PRECISIONS,
    TRAINER,
    Apart,
    Line,
    differences,
    judge,
)
from slurm_rlhf.records import Experience
from slurm_rlhf.run_directory import write_atomically

ARRAYS = ("prompt_lens", "response_lens", "token_ids", "action_mask", "rewards")
"""Fields of an Experience that are stored, besides its columns."""
LOG_LINES = 8


@dataclass(frozen=True, slots=True)
class Task:
    """Say what is compared, and where the stages leave their files."""

    subject: Line
    max_len: int
    scratch: Path  # a directory for this task alone

    @property
    def log(self) -> Path:
        return self.scratch / "log"

    def sampled(self, precision: str) -> Path:
        """Return where `sample` leaves the tokens and their log-probs."""
        return self.scratch / f"{precision}.npz"

    def compared(self, precision: str) -> Path:
        """Return where `follow` leaves the differences of the sides."""
        return self.scratch / f"{precision}.json"


class StageError(Exception):
    """End the comparison of a model in one precision; the message is the reason."""


class LateError(StageError):
    """End the comparison of a model whose time is over."""


def compare(subjects: Sequence[Line], precisions: Sequence[str], max_len: int, timeout_s: float) -> Iterator[Line]:
    """Yield a line for each subject and precision as soon as it is known. An error becomes a line, too.

    `precisions`: keys of verdicts.PRECISIONS; `timeout_s`: limit for one model, in all of them.
    """
    for subject in subjects:
        if subject.verdict:
            yield subject
            continue
        with tempfile.TemporaryDirectory(prefix="slurm-rlhf-parity-") as scratch:
            yield from _lines(Task(subject, max_len, Path(scratch)), precisions, timeout_s)


def _lines(task: Task, precisions: Sequence[str], timeout_s: float) -> Iterator[Line]:
    """Compare one model in all precisions until its time is over; an error in one does not stop the others."""
    deadline = time.monotonic() + timeout_s
    for name in precisions:
        line = replace(task.subject, precision=name, verdict=FAILED)
        try:
            for stage in (sample, follow):
                _run(task, deadline, stage, name)
            found = json.loads(task.compared(name).read_text(encoding="utf-8"))
            apart = {pair: Apart(*figures) for pair, figures in found["apart"].items()}
            verdict, reason = judge(apart, PRECISIONS[name])
            yield replace(line, verdict=verdict, reason=reason, tokens=found["tokens"], apart=apart)
        except LateError:
            yield replace(line, reason=f"{task.subject.model} was not done after {timeout_s:g} s (--timeout)")
        except StageError as error:
            yield replace(line, reason=str(error), log=tuple(tail(task.log, LOG_LINES)))


def _run(task: Task, deadline: float, stage: Callable[[Task, str], None], precision: str) -> None:
    """Run a stage in a forked process. Raises StageError with its error, LateError at the deadline."""
    sys.stdout.flush()
    sys.stderr.flush()
    refusal = task.scratch / "refusal"
    refusal.unlink(missing_ok=True)
    work = (os.getpid(), refusal, stage, task, precision)
    process = multiprocessing.get_context("fork").Process(target=_become, args=work)
    process.start()
    try:
        process.join(max(deadline - time.monotonic(), 0.0))
        late = process.is_alive()
    finally:
        process.kill()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid or 0, signal.SIGKILL)  # and all processes that it has started
        process.join()
    if late:
        raise LateError
    if refusal.exists():
        raise StageError(refusal.read_text(encoding="utf-8"))
    if process.exitcode:
        raise StageError(f"its process {exit_text(process.exitcode)}")


def _become(parent: int, refusal: Path, stage: Callable[[Task, str], None], task: Task, precision: str) -> None:
    """Run a stage, then `_exit`: the interpreter's teardown with torch and vLLM takes seconds or hangs."""
    code = 1
    try:
        os.setpgid(0, 0)  # so that it can be ended together with its children
        die_with_parent(parent)
        print_to(task.log)
        stage(task, precision)
        code = 0
    except SlurmRlhfError as error:
        refusal.write_text(str(error), encoding="utf-8")
    except BaseException as error:  # any error of vLLM, transformers and torch
        traceback.print_exc()
        first = next(iter(str(error).strip().splitlines()), "")
        refusal.write_text(f"{type(error).__name__}: {first}", encoding="utf-8")
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


# --- in the process of a stage ----------------------------------------------------------------------------------------


def sample(task: Task, precision: str) -> None:
    """Have the engine sample. Raises ModelError."""
    _prepare()
    from slurm_rlhf.parity import sides

    exp = sides.sample(sides.settings(task.subject.directory, PRECISIONS[precision], task.max_len))
    np.savez(
        task.sampled(precision), allow_pickle=False, **{name: getattr(exp, name) for name in ARRAYS}, **exp.columns
    )


def follow(task: Task, precision: str) -> None:
    """Compute the sampled tokens' log-probs by trainer and transformers, and compare all three. Raises ModelError."""
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


def _prepare() -> None:
    """Set the variables that the engine's library reads when it is imported."""
    from slurm_rlhf.engine.engine import backend

    backend(Config()).prepare_environment()
