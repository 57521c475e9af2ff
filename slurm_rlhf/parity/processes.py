"""Run the stages of each comparison in child processes, one after the other, with a time limit for each model."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from slurm_rlhf.cluster.gpu_query import local_gpus
from slurm_rlhf.cluster.processes import die_with_parent, exit_text, print_to
from slurm_rlhf.errors import SlurmRlhfError
from slurm_rlhf.observe.log_tail import tail
from slurm_rlhf.parity.stages import Task, follow, import_libraries, printing_to, read_compared, sample
from slurm_rlhf.parity.subjects import Subject
from slurm_rlhf.parity.verdicts import FAILED, FP32_BOUND, PRECISIONS, REFUSED, Line, judge

LOG_LINES = 8


@dataclass(frozen=True, slots=True)
class Options:
    """Says how to compare."""

    precisions: tuple[str, ...] = ("fp32", "bf16")  # keys of verdicts.PRECISIONS
    max_len: int = 320
    seed: int = 1
    fp32_bound: float = FP32_BOUND
    timeout_s: float = 600.0  # limit for one model, in all precisions


class StageError(Exception):
    """Ends the comparison of a model in one precision; the message is the reason."""


class LateError(StageError):
    """Ends the comparison of a model: its time is over."""


def compare(subjects: Sequence[Subject], options: Options) -> Iterator[Line]:
    """Yield a line for each subject and precision, as soon as it is known; what goes wrong in one is a line, too.

    Children are forked from this process. Without GPUs it imports the heavy libraries first, once for all of them: vLLM
    takes 7 s and more. With GPUs each imports its own, because importing asks the driver how many there are, and a
    process that has asked must not fork.
    """
    warm = not local_gpus(os.environ)
    for subject in subjects:
        if subject.refused or subject.failed:
            verdict = REFUSED if subject.refused else FAILED
            yield Line(subject.name, "", verdict, subject.refused or subject.failed, architecture=subject.architecture)
            continue
        with tempfile.TemporaryDirectory(prefix="slurm-rlhf-parity-") as scratch:
            if warm:
                with printing_to(Path(scratch) / "imports"):
                    import_libraries()
                warm = False
            yield from _lines(Task(subject, options.max_len, options.seed, Path(scratch)), options)


def _lines(task: Task, options: Options) -> Iterator[Line]:
    """Compare one model. After its time is over nothing more is started; a precision that fails is not the others'."""
    deadline = time.monotonic() + options.timeout_s
    for name in options.precisions:
        begun = time.monotonic()
        line = Line(task.subject.name, name, FAILED, architecture=task.subject.architecture)
        try:
            _run(task, deadline, lambda name=name: sample(task, name))  # type: ignore[misc]
            _run(task, deadline, lambda name=name: follow(task, name))  # type: ignore[misc]
            tokens, apart = read_compared(task, name)
            verdict, reason = judge(apart, PRECISIONS[name], options.fp32_bound)
            line = replace(line, verdict=verdict, reason=reason, tokens=tokens, apart=apart)
        except LateError:
            line = replace(line, reason=f"{task.subject.name} was not done after {options.timeout_s:g} s (--timeout)")
        except StageError as error:
            line = replace(line, reason=str(error), log=tuple(tail(task.log, LOG_LINES)))
        yield replace(line, seconds=time.monotonic() - begun)


def _run(task: Task, deadline: float, stage: Callable[[], None]) -> None:
    """Run a stage in a forked process. Raises StageError with what went wrong in it, LateError at the deadline."""
    sys.stdout.flush()
    sys.stderr.flush()
    parent, refusal = os.getpid(), task.scratch / "refusal"
    refusal.unlink(missing_ok=True)
    process = os.fork()
    if process == 0:
        _become(task, parent, refusal, stage)
    try:
        late = not _over(process, deadline - time.monotonic())
    finally:
        status = _end(process)
    if late:
        raise LateError
    if refusal.exists():
        raise StageError(refusal.read_text(encoding="utf-8"))
    if status:
        raise StageError(f"its process {exit_text(status)}")


def _become(task: Task, parent: int, refusal: Path, stage: Callable[[], None]) -> None:
    """Run a stage; the process ends here. Interpreter teardown of torch and vLLM takes seconds and can hang."""
    code = 1
    try:
        os.setpgid(0, 0)  # so that it can be ended with whatever it has started
        die_with_parent(parent)
        print_to(task.log)
        stage()
        code = 0
    except SlurmRlhfError as error:
        refusal.write_text(str(error), encoding="utf-8")
    except BaseException as error:  # whatever vLLM, transformers and torch raise
        traceback.print_exc()
        first = next(iter(str(error).strip().splitlines()), "")
        refusal.write_text(f"{type(error).__name__}: {first}", encoding="utf-8")
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _over(process: int, seconds: float) -> bool:
    """Wait for the end of a child; whether it came in time."""
    descriptor = os.pidfd_open(process)
    try:
        return bool(select.select([descriptor], [], [], max(seconds, 0.0))[0])
    finally:
        os.close(descriptor)


def _end(process: int) -> int:
    """End a child, if it is not over, and whatever it has started; its exit code, negative for a signal."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)  # it may have no group of its own yet; a zombie takes no notice
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
