"""Show a run as it goes, for `slurm-rlhf status RUN --watch`: the status, the reward's curve, phases, engines."""

from __future__ import annotations

import math
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from slurm_rlhf.errors import printable
from slurm_rlhf.observe.jsonl import whole_lines
from slurm_rlhf.observe.log_tail import read_end

INTERVAL_S = 2.0
PHASES = ("rollout", "reward", "forward", "update", "sync", "checkpoint", "eval")
"""Of a step, in its order: `time/<phase>` in metrics.jsonl."""
_CURVE = 60  # places
_READ = 1 << 20  # bytes from the end of metrics.jsonl
_ENGINE = re.compile(r"perf/engine/(\d+)/tokens_per_s")


def extra_lines(rows: list[dict[str, Any]], row: Callable[[str, str], str]) -> list[str]:
    """Describe the steps so far: rewards, the last step's phases, its engines. `row` writes (name, text)."""
    if not rows:
        return []
    last = rows[-1]
    lines = []
    for name in ("reward", "eval", "accuracy"):
        values = [each[name] for each in rows if each.get(name) is not None]
        if values:
            text = sparkline(values, _CURVE)
            lines.append(row(name, f"{text}  {values[0]:.4g} to {values[-1]:.4g} in {len(values)} steps"))
    parts = {name: last[f"time/{name}"] for name in PHASES if last.get(f"time/{name}")}
    if parts:
        shown = ", ".join(f"{name} {seconds:.3g} s" for name, seconds in parts.items())
        lines += [row("last step", bar(parts, _CURVE)), row("", shown)]
    return [*lines, *_engines(last, row)]


def _engines(last: dict[str, Any], row: Callable[[str, str], str]) -> list[str]:
    speeds = {int(found[1]): value for name, value in last.items() if (found := _ENGINE.fullmatch(name)) and value}
    if not speeds:
        return []
    text = sparkline([speeds[engine] for engine in sorted(speeds)], _CURVE) if len(speeds) > 1 else ""
    slowest = min(speeds, key=lambda engine: speeds[engine])
    detail = f", the slowest is engine {slowest} with {speeds[slowest]:.0f}" if len(speeds) > 1 else ""
    return [row("engines", f"{text}{'  ' if text else ''}{sum(speeds.values()):.0f} tokens/s{detail}")]


def rows_of(directory: Path) -> list[dict[str, Any]]:
    """Read the last steps of a run; empty before its first."""
    try:
        return [row for _, row in whole_lines(read_end(directory / "metrics.jsonl", most=_READ))]
    except OSError:
        return []


def show(frames: Iterator[list[str]]) -> None:
    """Show one frame after the other in its place on a terminal; elsewhere each that differs, below the last one."""
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


def repeated(frame: Callable[[], tuple[list[str], bool]], interval_s: float) -> Iterator[list[str]]:
    """Yield frames, one every `interval_s`, to the first that says that the run is over."""
    while True:
        lines, over = frame()
        yield lines
        if over:
            return
        time.sleep(interval_s)


_BLOCKS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float | None], width: int) -> str:
    """Draw the last values as at most `width` blocks from the smallest to the largest; what is no number is a space.

    More values than places: each place has the mean of its share.
    """
    numbers = [value if value is not None and math.isfinite(value) else None for value in values]
    count = min(width, len(numbers))
    shares = [numbers[place * len(numbers) // count : (place + 1) * len(numbers) // count] for place in range(count)]
    means = [_mean([value for value in share if value is not None]) for share in shares]
    known = [mean for mean in means if mean is not None]
    if not known:
        return ""
    low, spread = min(known), max(known) - min(known)
    return "".join(" " if mean is None else _BLOCKS[_level(mean, low, spread)] for mean in means)


def bar(parts: Mapping[str, float], width: int) -> str:
    """Draw positive numbers as runs of their first letter, `width` characters in all: `rrrrrruuuus`.

    Each part gets its share, rounded down, and what is left over goes to those that lost most; none is longer by two.
    """
    total = sum(parts.values())
    if not total > 0:
        return ""
    exact = {name: value / total * width for name, value in parts.items()}
    whole = {name: int(length) for name, length in exact.items()}
    by_loss = sorted(exact, key=lambda name: exact[name] - whole[name], reverse=True)
    for name in by_loss[: width - sum(whole.values())]:
        whole[name] += 1
    return "".join(name[0] * length for name, length in whole.items())


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _level(value: float, low: float, spread: float) -> int:
    return int((value - low) / spread * (len(_BLOCKS) - 1) + 0.5) if spread else len(_BLOCKS) // 2
