"""Continue a run in another allocation: requeue this job, submit its successor, or leave it to a chain.

The successor is the same script with the same arguments and options. The options on the command line of sbatch are in
no script: they are read from what Slurm shows of the job.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

from slurm_rlhf.cluster.slurm_environment import SlurmEnvironment, read_slurm
from slurm_rlhf.cluster.slurm_job import command
from slurm_rlhf.cluster.stop import Arrangement, Continuation, immune, termination
from slurm_rlhf.config.schema import Slurm
from slurm_rlhf.nodes.environment import VISIBLE
from slurm_rlhf.nodes.srun import SLURM_OPTIONS
from slurm_rlhf.wire import timeouts

_AGAIN_S = 10.0
_AWAY = ("contact", "timed out", "no answer", "Connection", "Zero Bytes", "standby", "temporarily")
"""In what Slurm's commands say when the controller is away, and not when it refuses."""
SCRIPT = "successor.sh"
"""In `.control` of the run directory."""

PARENT_REQUEUES = "SLURM_RLHF_PARENT_REQUEUES"
"""Variable that such a parent sets: the signal that makes the parent of this process requeue the job."""


class SlurmContinuation(Continuation):
    """Requeue the job of this process, or submit its successor."""

    def __init__(
        self, slurm: SlurmEnvironment, environ: Mapping[str, str], argv: Sequence[str], directory: Path
    ) -> None:
        """`argv`: the words this program was started with. `directory`: for a copy of the batch script."""
        self._job = str(slurm.job_id)
        self._slurm = slurm
        self._environ = environ
        self._argv = argv
        self._directory = directory
        self._last: float | None = None  # by time.monotonic(): clocks of nodes are set

    def end_time(self) -> float | None:
        """Read the end from the environment, else ask `squeue` once (Slurm before 23.02 sets no variable)."""
        end = float(self._slurm.end_time) if self._slurm.end_time is not None else self._asked_end()
        self._last = None if end is None else time.monotonic() + end - time.time() - timeouts.REQUEUE_END_S
        return end

    def _asked_end(self) -> float | None:
        answer = command(["squeue", "-h", "-j", self._job, "-o", "%e"])
        try:
            return datetime.fromisoformat(answer.stdout.strip()).timestamp()
        except ValueError:
            return None  # the job has no limit, or the controller did not answer; Slurm's signal stops the run in time

    def go_on(self) -> Arrangement:
        """Run `scontrol requeue`, else `sbatch --dependency=afterany`. Only the main thread may call it.

        Slurm ends a requeued job at once, beginning with SIGTERM, and its nodes are blocked until its processes have
        ended: this waits for that SIGTERM and no longer. Where neither works, because the controller is away, it is
        tried again until shortly before the end of the allocation.
        """
        last = self._last or time.monotonic() + timeouts.REQUEUE_S
        with termination() as terminated:
            while True:
                with immune():
                    requeued = command(["scontrol", "requeue", self._job])
                if requeued.returncode == 0:
                    terminated.wait(timeouts.REQUEUED_KILL_S)
                    return Arrangement(f"job {self._job} is requeued", True)
                why = requeued.stderr.strip() or "scontrol requeue failed"
                # A controller that is away takes no job either, and each command may wait for it for half a minute.
                arranged = self._refused(why) if is_away(why) else self._submit(why)
                away = not arranged.sure and is_away(arranged.text)
                if not away or time.monotonic() > last or terminated.wait(_AGAIN_S):
                    return arranged

    def _refused(self, why: str) -> Arrangement:
        return Arrangement(f"job {self._job} could not be requeued ({why}); submit the same command to go on", False)

    def _submit(self, why: str) -> Arrangement:
        shown = command(["scontrol", "show", "job", self._job])
        written = command(["scontrol", "write", "batch_script", self._job, "-"])
        if shown.returncode or written.returncode or not written.stdout.startswith("#!"):
            return self._refused(why)
        options, arguments = successor(shown.stdout, self._environ, self._argv)
        script = self._directory / SCRIPT
        script.write_text(written.stdout, encoding="utf-8")
        submitted = command(
            ["sbatch", "--parsable", f"--dependency=afterany:{self._job}", *options, str(script), *arguments],
            env=successor_environment(self._environ),
            cwd=self._slurm.submit_dir,  # SLURM_SUBMIT_DIR of the next job: scripts find their files by it
        )
        if submitted.returncode == 0:
            text = f"requeue is not allowed here ({why}); job {submitted.stdout.strip()} follows this one"
            return Arrangement(text, True)
        text = submitted.stderr.strip()
        text = f"neither requeue ({why}) nor sbatch ({text}) worked; submit the same command to go on"
        return Arrangement(text, False)


class ChainContinuation(SlurmContinuation):
    """Leave the rest to the next job of a chain."""

    def go_on(self) -> Arrangement:
        """Arrange nothing: requeued, this job would wait behind those that were submitted with it."""
        return Arrangement("the next job of the chain goes on", True)

    def finished(self) -> str:
        """Cancel the waiting tasks of this array, or the waiting jobs that are this one again."""
        array = self._slurm.array_job_id
        which = [str(array)] if array is not None else self._copies()
        if not which:
            return ""
        done = command(["scancel", "--state=PENDING", *which])
        if done.returncode:
            text = done.stderr.strip()
            return f"jobs {', '.join(which)}, which wait to go on with this run, could not be cancelled: {text}"
        return f"the jobs that waited to go on with this run are cancelled: {', '.join(which)}"

    def _copies(self) -> list[str]:
        """List the pending jobs with Dependency=singleton of this name, script, arguments and directory.

        Other experiments may have the same name: they train in another run directory, and so have other arguments.
        """
        waiting = [job for job, _, after in _waiting(self._slurm.job_name) if "singleton" in after]
        own, *others = map(_what, (str(self._slurm.job_id), *waiting))
        return [job for job, what in zip(waiting, others, strict=True) if what == own and all(own)]


class ParentContinuation(Continuation):
    """Let the parent of this process, which knows the time, requeue the job."""

    def __init__(self, number: int, parent: int) -> None:
        self._number = signal.Signals(number)
        self._parent = parent

    def go_on(self) -> Arrangement:
        os.kill(self._parent, self._number)
        return Arrangement("the job is requeued by the process that submitit started", True)


def _waiting(name: str) -> list[tuple[str, str, str]]:
    """List (job, a blank, its dependency) of this user's pending jobs of this name."""
    words = ["squeue", "-h", "-t", "PENDING", f"--name={name}", f"--user={os.getuid()}", "-o", "%i %E"]
    return [line.partition(" ") for line in command(words).stdout.splitlines()]


def is_away(text: str) -> bool:
    """Tell whether a command of Slurm failed because its controller is away."""
    return any(word in text for word in _AWAY)


def _what(job: str) -> list[str]:
    """Return what tells whether two jobs are the same run: the script, which may name it, its arguments, its place."""
    shown = command(["scontrol", "show", "job", job]).stdout
    script = command(["scontrol", "write", "batch_script", job, "-"]).stdout
    return [script, _field(shown, "Command") or "(--wrap)", _field(shown, "WorkDir")]


def continuation_of(settings: Slurm, run_dir: Path, environ: Mapping[str, str]) -> Continuation:
    """Choose how the run in `run_dir` continues with these `settings` in this environment."""
    if PARENT_REQUEUES in environ:
        return ParentContinuation(int(environ[PARENT_REQUEUES]), os.getppid())
    slurm = read_slurm(environ)
    if slurm is None:
        return Continuation()
    kind = ChainContinuation if settings.chain else SlurmContinuation
    return kind(slurm, environ, sys.argv[1:], run_dir / ".control")


_OVERSUBSCRIBE = {"NO": "--exclusive", "USER": "--exclusive=user", "YES": "--oversubscribe"}
_LINES = ("JobName", "Comment", "WorkDir", "Command", "StdOut", "StdErr")
_EMPTY = {"", "(null)", "N/A"}
_GPU = re.compile(r"gres[:/]gpu\b")


def successor(shown: str, environ: Mapping[str, str], argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the command line of sbatch for the job after the one that `scontrol show job` describes in `shown`.

    It has options, and the arguments of the script. `environ`: the variables of its
    batch step; `argv`: the words that the script gave to this program.
    """
    fields = SLURM_OPTIONS["fields"].items()
    options = [f"{option}={value}" for field, option in fields if (value := _field(shown, field))]
    options += [f"{option}={environ[name]}" for name, option in SLURM_OPTIONS["variables"].items() if environ.get(name)]
    options += _resources(shown, environ) + _files(shown)
    if sharing := _OVERSUBSCRIBE.get(_field(shown, "OverSubscribe")):
        options.append(sharing)
    if _field(shown, "Requeue") == "0":
        options.append("--no-requeue")
    return options, split_command(_field(shown, "Command"), argv)


def split_command(command: str, argv: Sequence[str]) -> list[str]:
    """Return the arguments in `command`, which Slurm shows as words with blanks between them, the script first.

    A script that ends in `exec slurm-rlhf train FILE "$@"` has passed its arguments on: what `argv` and `command` both
    end with are these arguments, blanks inside them included. Arguments that it did not pass on are split at blanks.
    """
    for first in range(len(argv)):
        tail = list(argv[first:])
        if command.endswith(text := " " + " ".join(tail)):
            return _split_head(command.removesuffix(text)) + tail
    return _split_head(command)


def successor_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Copy `environ` for sbatch without what Slurm has set: the next job would take it for its own."""
    return {
        name: value
        for name, value in environ.items()
        if name == "SLURM_CONF" or not (name.startswith(("SLURM_", "SLURMD_")) or name == VISIBLE)
    }


def _split_head(head: str) -> list[str]:
    return [] if Path(head).is_file() else head.split(" ")[1:]


def _resources(shown: str, environ: Mapping[str, str]) -> list[str]:
    """Return --gres without what --gpus-per-node asks for: Slurm would add the two."""
    items = [item for item in _field(shown, "TresPerNode").split(",") if item]
    if environ.get("SLURM_GPUS_PER_NODE"):
        items = [item for item in items if not _GPU.match(item)]
    names = ",".join(re.sub(r"^gres[:/]", "", item) for item in items)
    return [f"--gres={names}"] if names else []


def _files(shown: str) -> list[str]:
    """Return the options that append to the same logs, as after a requeue."""
    out, err = _field(shown, "StdOut"), _field(shown, "StdErr")
    words = ["--open-mode=append"]
    if out:
        words.append(f"--output={out.replace('%', '%%')}")
    if err and err != out:
        words.append(f"--error={err.replace('%', '%%')}")
    return words


def _field(shown: str, name: str) -> str:
    """Return the value of `name`, or "". Those of `_LINES` may hold blanks, and are up to the end of their line."""
    rest = r"(.*)$" if name in _LINES else r"(\S*)"
    found = re.search(rf"(?:^|\s){re.escape(name)}={rest}", shown, re.MULTILINE)
    value = found[1] if found else ""
    if name != "Command":
        value = value.strip()
    return "" if value in _EMPTY else value
