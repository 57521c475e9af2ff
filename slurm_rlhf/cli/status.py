"""Run `slurm-rlhf status RUN`: show its job, its progress and what failed, once or (`--watch`) until it is over."""

from __future__ import annotations

import math
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from statistics import fmean
from typing import Any

from slurm_rlhf.cli.commands import Arguments
from slurm_rlhf.cli.pipeline import pipeline_lines, pipeline_of
from slurm_rlhf.cli.runs import Found, find
from slurm_rlhf.cluster.processes import CONDUCTOR_GONE, attach_line
from slurm_rlhf.cluster.slurm_job import OVER, Job, place_in_queue, reason_words, state_words
from slurm_rlhf.environments.records import CALLS
from slurm_rlhf.errors import printable, shortened
from slurm_rlhf.nodes.requeue import last_words
from slurm_rlhf.observe.log_tail import ends_in_error, tail
from slurm_rlhf.observe.progress import duration
from slurm_rlhf.observe.run_log import engines_lost, read_events, server_awaited, workers_lost
from slurm_rlhf.observe.run_status import RunStatus, read_run_status
from slurm_rlhf.report.pictures import PHASES
from slurm_rlhf.run_directory import RunDirectory
from slurm_rlhf.wire import timeouts

INTERVAL_S = 2.0
_NAME = 12  # columns of a row's name
_LINES = 12  # lines of a log
_CURVE = 60  # columns of a curve
_ENGINE = re.compile(r"perf/engine/(\d+)/tokens_per_s")
_RANK_LOG = re.compile(r"(?!conductor\.)[a-z]+\.(?P<node>.+)\.\d+\.log")
_LEFT = re.compile(rf"^{CONDUCTOR_GONE}: |: the conductor at \S+ is lost: ")
"""Last line of the log of a rank that lost the conductor: written by its I/O thread, or by its main thread."""
_LEFT_LINES = 80
"""Lines read from the end of a rank's log: enough for the traceback of a step."""


def show_status(arguments: Arguments) -> int:
    """Print the status. Raises ConfigError if RUN names no run, RunError if slurmctld does not answer."""
    run = arguments.one_word("run directory or job number")
    if "watch" in arguments.options:
        show(watched(run))
    else:
        print(printable("\n".join(status_of(run)[0])))
    return 0


def watched(word: str) -> Iterator[list[str]]:
    """Yield the status with curves every `INTERVAL_S`, until the run is over."""
    while True:
        lines, over = status_of(word, curves=True)
        yield lines
        if over:
            return
        time.sleep(INTERVAL_S)


def show(frames: Iterator[list[str]]) -> None:
    """Show each frame in place of the last one on a terminal; elsewhere print each frame that differs."""
    if not sys.stdout.isatty():
        before: list[str] = []
        for frame in frames:
            if frame != before:
                print(printable("\n".join(frame)), end="\n\n", flush=True)
            before = frame
        return
    from rich.live import Live
    from rich.text import Text

    with Live(Text(""), auto_refresh=False, transient=False) as live:
        for frame in frames:
            live.update(Text(printable("\n".join(frame)), no_wrap=True, overflow="ellipsis"), refresh=True)


def status_of(word: str, curves: bool = False) -> tuple[list[str], bool]:
    """Return the lines that describe a run, and whether it is over."""
    if (whole := pipeline_of(Path(word).expanduser())) is not None:
        return pipeline_lines(whole)
    found = find(word)
    if found.directory is None:
        return [*job_lines(found), _row("run", "its directory is not known yet: the job prints it at its start")], False
    directory = RunDirectory(found.directory)
    status = read_run_status(directory.metrics, directory.summary)
    cut_off = _cut_off(found, status)
    lines = [*job_lines(found), *run_lines(found, directory, status, cut_off)]
    lines += [*(curve_lines(status.rows) if curves else ()), *failure_lines(found, directory, status, cut_off)]
    return lines, cut_off or status.status not in ("", "running")


def job_lines(found: Found) -> list[str]:
    """Describe the job: its state, what that means, what to do, how to look inside."""
    job = found.job
    if found.unasked:
        return [_row("job", f"{found.job_id}: {found.unasked}")]
    if job is None:
        if found.job_id:
            return [_row("job", f"{found.job_id}: slurmctld has forgotten it (MinJobAge), so it is over")]
        where = f" on {found.session.host}, process {found.session.pid}" if found.session else ""
        return [_row("job", f"none: started without Slurm{where}")]
    what, todo = state_words(job.state)
    where = f" on {job.nodes}" if job.nodes not in ("", "(null)") else ""
    lines = [_row("job", f"{job.id}{where}: {job.state}: it {what}{_exit(job)}")]
    if job.state == "PENDING":
        lines += [*([_row("", why)] if (why := reason_words(job.reason)) else ()), *queue_lines(job)]
    if job.restarts not in ("", "0"):
        lines.append(_row("", f"requeued {job.restarts} times"))
    lines += [_row("", todo)] if todo else []
    if job.is_headless:
        lines += [
            _row("", f"its first node {job.batch_host} is gone, and with it the conductor: no process leads the run."),
            _row("", "Another node that had an engine requeues the job within a minute, and the run goes on from its"),
            _row("", f"newest checkpoint. If no node does that: scontrol requeue {job.id}"),
        ]
    elif found.directory is not None and (ended := last_words(found.directory, job)):
        lines.append(_row("", ended))
    if job.state == "RUNNING" and found.session is not None and found.session.job_id == job.number:
        lines.append(_row("look inside", attach_line(job.number, found.session.first_node)))
    if found.others:
        counts = Counter(other.state for other in found.others)
        lines.append(_row("array", "its other tasks: " + ", ".join(f"{n} {state}" for state, n in counts.items())))
    return lines


def queue_lines(job: Job) -> list[str]:
    """Say where a job is in the queue of its partition, and when Slurm expects to start it, if Slurm tells that."""
    lines = []
    if place := place_in_queue(job, timeouts.SLURM_STATUS_S):
        lines.append(_row("queue", f"{place[0]} of {place[1]} that wait in {job.partition}, by priority"))
    with suppress(ValueError):  # Unknown
        start = datetime.fromisoformat(job.start_time)
        lines.append(_row("start", f"Slurm expects it on {start:%a %d %b at %H:%M}, or earlier when others end early"))
    return lines


def run_lines(found: Found, directory: RunDirectory, status: RunStatus, cut_off: bool) -> list[str]:
    """Describe the run: step, reward, pace, end."""
    state = _state(found, directory, status, cut_off)
    lines = [_row("run", f"{directory.root}{f': {state}' if state else ''}")]
    if not status.total:
        return lines
    reward = "" if status.reward is None else f", reward {status.reward:.4g}"
    lines.append(_row("step", f"{status.step}/{status.total}{reward}"))
    if "turns" in (last := status.rows[-1] if status.rows else {}):
        lines.append(_episodes(last))
    lines += [_row("restart", f"{number} in place: {why}") for number, why in enumerate(status.restarts, 1)]
    running = status.status == "running" and not cut_off
    if running and status.starting:  # the pace is that of an earlier start
        return [*lines, _row("starting", f"{status.starting} ({duration(status.starting_s)} ago)")]
    if status.step_s is not None and status.age_s is not None:
        pace = f"{status.step_s:.3g} s" if status.step_s < 60 else duration(status.step_s)
        lines.append(_row("pace", f"{pace} a step, the last one {duration(status.age_s)} ago"))
    if running:
        events = read_events(directory.events)
        if waited := server_awaited(events):
            lines.append(_row("paused", waited.removeprefix("warning: ")))
        lines += [_row("engines", text.splitlines()[0]) for text in engines_lost(events).values()]
        lines += [_row("workers", text.removeprefix("warning: ")) for text in workers_lost(events)]
    if running and status.left_s is not None and not waited:
        end = datetime.fromtimestamp(time.time() + status.left_s)
        lines.append(_row("left", f"{duration(status.left_s)}, until {end:%a %H:%M}{_too_late(found.job, end)}"))
    return lines


def failure_lines(found: Found, directory: RunDirectory, status: RunStatus, cut_off: bool) -> list[str]:
    """Show the error, or the last lines of the logs if the run could not write one."""
    if status.status == "failed":
        return ["", f"error: {status.error}"]
    if not cut_off:
        return []
    logs = [path for path in directory.logs.glob("*.log") if path.stat().st_size]
    if found.job and found.job.output and Path(found.job.output).exists():
        logs.append(Path(found.job.output))
    newest = sorted(logs, key=lambda path: path.stat().st_mtime)[-2:]
    return [
        line
        for log in newest
        for line in ("", f"the last lines of {log}:", *(f"    {text}" for text in tail(log, _LINES)))
    ]


def _state(found: Found, directory: RunDirectory, status: RunStatus, cut_off: bool) -> str:
    if cut_off:
        return "it was cut off in the middle and could not say why; checkpoints are intact"
    if status.status == "running" and (nodes := _without_conductor(found, directory)):
        return (
            f"the conductor is gone: its ranks on {shortened(nodes)} say so, and have ended; checkpoints are intact. "
            "When Slurm finds the node down (SlurmdTimeout), it ends the job or requeues it; with --no-kill one of the "
            "other nodes does"
        )
    return status.status


def _without_conductor(found: Found, directory: RunDirectory) -> list[str]:
    """List the nodes whose ranks have ended because they lost the conductor; empty if a rank still runs."""
    session, nodes = found.session, set()
    if session is None or (found.job is not None and found.job.state != "RUNNING"):
        return []
    for log in directory.logs.glob("*.log"):
        rank = _RANK_LOG.fullmatch(log.name)
        if rank and rank["node"] != session.first_node and log.stat().st_mtime > session.began:
            last = tail(log, _LEFT_LINES)
            if _LEFT.search(last[-1]):
                nodes.add(rank["node"])
            elif not ends_in_error(last):  # an error: a collective with a rank that had ended before
                return []
    return sorted(nodes)


def _cut_off(found: Found, status: RunStatus) -> bool:
    """Tell whether summary.json says that the run goes on although its process is gone."""
    if status.status != "running" or found.unasked or found.session is None:
        return False
    if found.job_id:
        return found.job is None or bool(OVER & set(found.job.state.split(",")))
    return not found.alive


def _exit(job: Job) -> str:
    status, _, number = job.exit_code.partition(":")
    if status in ("", "0") and number in ("", "0"):
        return ""
    return f" (exit code {status}{f', signal {number}' if number not in ('', '0') else ''})"


def _too_late(job: Job | None, end: datetime) -> str:
    with suppress(ValueError):  # Unknown: no time limit
        if job is not None and (over := datetime.fromisoformat(job.end_time)) < end:
            return f"; its allocation ends before, {over:%a %H:%M}"
    return ""


def _row(name: str, text: str) -> str:
    return f"{name:{_NAME}}{text}"


def _episodes(last: dict[str, Any]) -> str:
    """Describe the episodes of the last step, which had environments."""
    tools = [f"{value:.1%} {name[6:]}" for name, value in last.items() if name[:6] == "tools/" and name[6:] != CALLS]
    called = f", {last[f'tools/{CALLS}']:.3g} calls of tools, of which {', '.join(tools)}" if tools else ""
    return _row("episodes", f"{last['turns']:.3g} turns{called}; {last['lost']:.1%} of them lost")


def curve_lines(rows: list[dict[str, Any]]) -> list[str]:
    """Describe the steps so far: rewards as curves, the last step's phases and engines."""
    if not rows:
        return []
    last, lines = rows[-1], []
    for name in ("reward", "eval", "accuracy"):
        if values := [row[name] for row in rows if row.get(name) is not None]:
            text = sparkline(values, _CURVE)
            lines.append(_row(name, f"{text}  {values[0]:.4g} to {values[-1]:.4g} in {len(values)} steps"))
    if parts := {name: last[f"time/{name}"] for name in PHASES if last.get(f"time/{name}")}:
        lines.append(_row("last step", ", ".join(f"{name} {value:.3g} s" for name, value in parts.items())))
    speeds = {int(found[1]): value for name, value in last.items() if (found := _ENGINE.fullmatch(name)) and value}
    if speeds:
        text, slowest = f"{sum(speeds.values()):.0f} tokens/s", min(speeds, key=lambda engine: speeds[engine])
        if len(speeds) > 1:
            text = f"{sparkline([speeds[engine] for engine in sorted(speeds)], _CURVE)}  {text}"
            text += f", the slowest is engine {slowest} with {speeds[slowest]:.0f}"
        lines.append(_row("engines", text))
    return lines


_BLOCKS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float | None], width: int) -> str:
    """Draw values as at most `width` blocks of different heights; a value that is not a finite number is a space.

    If there are more values than blocks, a block is the mean of its neighbours.
    """
    numbers = [value if value is not None and math.isfinite(value) else None for value in values]
    count = min(width, len(numbers))
    shares = [numbers[place * len(numbers) // count : (place + 1) * len(numbers) // count] for place in range(count)]
    there = [[value for value in share if value is not None] for share in shares]
    means = [fmean(each) if each else None for each in there]
    known = [mean for mean in means if mean is not None]
    if not known:
        return ""
    low, spread = min(known), max(known) - min(known)
    return "".join(" " if mean is None else _BLOCKS[_level(mean, low, spread)] for mean in means)


def _level(value: float, low: float, spread: float) -> int:
    return int((value - low) / spread * (len(_BLOCKS) - 1) + 0.5) if spread else len(_BLOCKS) // 2
