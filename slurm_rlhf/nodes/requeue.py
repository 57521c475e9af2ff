"""Continue a run in another allocation: requeue this job, submit its successor, or leave it to a chain.

The successor is the same script with the same arguments and options. The options on the command line of sbatch are in
no script: they are read from what Slurm shows of the job.

A job may have lost its first node, and the conductor with it.

With `--no-kill` Slurm leaves such a job as it is: it would keep its other nodes, idle, until its time is over. So the
agent of engines on another node, whose ranks have left, stays. It waits until slurmctld has marked the first node down
(SlurmdTimeout) and requeues the job, or cancels it where it is not to be requeued. Without `--no-kill` Slurm requeues
or ends the job itself, and the agent with it.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from slurm_rlhf.cluster.network import unreachable
from slurm_rlhf.cluster.slurm_environment import SlurmEnvironment, read_slurm
from slurm_rlhf.cluster.slurm_job import Job, ask_jobs, command
from slurm_rlhf.cluster.stop import Arrangement, Continuation, immune, termination
from slurm_rlhf.config.load import load_config
from slurm_rlhf.config.roles import ROLLOUT
from slurm_rlhf.config.schema import Slurm
from slurm_rlhf.errors import RunError
from slurm_rlhf.nodes.environment import VISIBLE
from slurm_rlhf.nodes.facts import StepSpec
from slurm_rlhf.nodes.srun import SLURM_OPTIONS
from slurm_rlhf.placement.rank_map import RankMap
from slurm_rlhf.polling import wait_until
from slurm_rlhf.run_directory import RunDirectory, write_atomically
from slurm_rlhf.wire import timeouts

_AGAIN_S = 10.0
_AWAY = ("contact", "timed out", "no answer", "Connection", "Zero Bytes", "standby", "temporarily")
"""Words in the errors of Slurm's commands when the controller is away, and not when it refuses."""
SCRIPT = "successor.sh"
"""Name of the copy of the batch script, in `.control` of the run directory."""

PARENT_REQUEUES = "SLURM_RLHF_PARENT_REQUEUES"
"""Variable set by a parent that requeues the job itself: number of the signal that asks it to."""


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
        self._last: float | None = None  # last time to try, by time.monotonic(): the clocks of nodes are set

    def end_time(self) -> float | None:
        """Read the end from the environment, else ask `squeue` once (Slurm before 23.02 sets no variable)."""
        end: float | None = self._slurm.end_time
        if end is None:
            answer = command(["squeue", "-h", "-j", self._job, "-o", "%e"])
            # Without a limit, or an answer of the controller, Slurm's signal stops the run in time.
            with suppress(ValueError):
                end = datetime.fromisoformat(answer.stdout.strip()).timestamp()
        self._last = None if end is None else time.monotonic() + end - time.time() - timeouts.REQUEUE_END_S
        return end

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
        words = ["squeue", "-h", "-t", "PENDING", f"--name={self._slurm.job_name}", f"--user={os.getuid()}"]
        pending = [line.partition(" ") for line in command([*words, "-o", "%i %E"]).stdout.splitlines()]
        waiting = [job for job, _, after in pending if "singleton" in after]
        own, *others = map(_identity, (str(self._slurm.job_id), *waiting))
        return [job for job, what in zip(waiting, others, strict=True) if what == own and all(own)]


class ParentContinuation(Continuation):
    """Let the parent of this process, which knows the time, requeue the job."""

    def __init__(self, number: int, parent: int) -> None:
        self._number = signal.Signals(number)
        self._parent = parent

    def go_on(self) -> Arrangement:
        os.kill(self._parent, self._number)
        return Arrangement("the job is requeued by the process that submitit started", True)


def is_away(text: str) -> bool:
    """Tell whether a command of Slurm failed because its controller is away."""
    return any(word in text for word in _AWAY)


def _identity(job: str) -> list[str]:
    """Return script, arguments and directory of a job: two jobs that have them in common are the same run."""
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
    """Return the value of `name`, or "". A field of `_LINES` may hold blanks, and ends with its line."""
    rest = r"(.*)$" if name in _LINES else r"(\S*)"
    found = re.search(rf"(?:^|\s){re.escape(name)}={rest}", shown, re.MULTILINE)
    value = found[1] if found else ""
    if name != "Command":
        value = value.strip()
    return "" if value in _EMPTY else value


SUCCESSORS = 2
"""Number of nodes that watch the first one: one acts even if the other is down, too."""
_FIRST_S = 2.0
_LONGEST_S = 15.0
"""First and longest pause in seconds between two queries of slurmctld."""

WAIT, LEAVE, REQUEUE, CANCEL = "wait", "leave", "requeue", "cancel"


def successors(ranks: RankMap, first: str) -> list[str]:
    """Return the nodes that wait: the first ones with an engine that are not `first`."""
    nodes = (share.node for share in ranks.roles.get(ROLLOUT, ()) if share.node != first)
    return list(dict.fromkeys(nodes))[:SUCCESSORS]


def decide(job: Job | None, restarts: int, chain: bool) -> str:
    """Say what is to be done: WAIT, LEAVE, REQUEUE or CANCEL.

    `job`: as slurmctld has it now, None if it has forgotten it; `restarts`: how often it was requeued when this process
    was started; `chain`: another job goes on with the run.
    """
    if job is None or "RUNNING" not in job.state.split(",") or job.restarts not in (str(restarts), ""):
        return LEAVE
    if not job.is_headless:
        return WAIT
    return CANCEL if chain or job.requeue == "0" else REQUEUE


def mark(run_dir: Path, job: str, restarts: int) -> Path:
    """Name the file that says what was done after this start of a job; the process that makes it may do it."""
    return run_dir / ".control" / f"headless.{job}.{restarts}"


def last_words(run_dir: Path, job: Job) -> str:
    """Return what ended the newest start of a job that has lost its first node; empty: nothing has."""
    count = int(job.restarts or 0)
    for restarts in (count, count - 1):  # the first if it was cancelled, the second if it was requeued
        with suppress(OSError):
            return mark(run_dir, job.number, restarts).read_text(encoding="utf-8").strip()
    return ""


@dataclass(slots=True)
class Successor:
    """Watches on `node` whether the first node of the job is lost, and ends or requeues the job then."""

    job: str  # number of the job
    restarts: int
    first: str
    node: str
    run_dir: Path
    endpoint: tuple[str, int]  # address and port of the conductor
    chain: bool = False
    _claimed: bool = field(default=False, init=False)

    def settled(self) -> bool:
        """Check once, and act if that is needed; return whether nothing is left to do. Blocks for 30 s at most."""
        if not unreachable(*self.endpoint):  # it was stopped, or this node was cut off
            return True
        try:
            jobs = ask_jobs(self.job)
        except RunError:  # slurmctld is away, too
            return False
        job = next((job for job in jobs if job.number == self.job), None)
        what = decide(job, self.restarts, self.chain)
        if job is None or what in (WAIT, LEAVE):
            return what == LEAVE
        if not self._claim():
            return True
        self._act(job, what)
        return False

    def _claim(self) -> bool:
        """Tell whether this process is the one that acts."""
        if not self._claimed:
            try:
                mark(self.run_dir, self.job, self.restarts).touch(exist_ok=False)
            except FileExistsError:
                return False
            except OSError as error:  # the disk is full: the count of restarts is the only guard
                print(error, flush=True)
            self._claimed = True
        return True

    def _act(self, job: Job, what: str) -> None:
        """Requeue the job, or cancel it where that is refused. Slurm ends this process with it."""
        why = f"its first node {self.first} was down, and with it the conductor"
        if what == REQUEUE:
            self._say(f"{why}: {self.node} has requeued it")  # before: there may be no time afterwards
            refused = command(["scontrol", "requeue", job.id])
            if refused.returncode == 0 or is_away(refused.stderr):
                return
            why += f" (scontrol requeue: {refused.stderr.strip()})"
        self._say(f"{why}: {self.node} has cancelled it")
        command(["scancel", job.id])

    def _say(self, text: str) -> None:
        print(text, flush=True)
        with suppress(OSError):
            write_atomically(mark(self.run_dir, self.job, self.restarts), f"{text}\n")


def await_end(spec: StepSpec, ranks: RankMap, node: str, endpoint: tuple[str, int]) -> None:
    """Wait for the end of a job whose conductor, at `endpoint`, is gone, and see to it; this process ends with it."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # scancel ends it at once, and it requeues no cancelled job
    slurm = read_slurm(os.environ)
    if slurm is None or node not in successors(ranks, slurm.job_nodes[0]):
        return
    job, first, run_dir = str(slurm.job_id), slurm.job_nodes[0], Path(spec.run_dir)
    by_hand = f"scontrol requeue {job}, where that has not happened yet: it goes on from the newest checkpoint, if any"
    if shutil.which("scontrol") is None:
        print(f"{node} does not hear {first}, and there is no scontrol here (a container?) to ask: {by_hand}")
        return
    config = load_config(RunDirectory(run_dir).config, [])
    limit_s = config.timeout.node_down
    successor = Successor(job, slurm.restart_count, first, node, run_dir, endpoint, config.slurm.chain)
    print(f"{node} waits for slurmctld to mark {first} down, {limit_s:g} s at most (timeout.node_down)", flush=True)
    if not wait_until(successor.settled, limit_s, _FIRST_S, _LONGEST_S):
        print(f"slurmctld has not marked {first} down within {limit_s:g} s (timeout.node_down): {by_hand}")
