"""Run the default tests as several sessions of pytest, one for each core at a time; tests/run.sh starts this file.

Each lane is a whole session: its own mark of processes, its own check of what was skipped or left running. More at a
time than cores take longer, and more processor time. What a lane says about its tests is shown line by line,
with the lane's name in front; its failures and warnings follow in one piece when it has ended. Tests that failed run
once more when all lanes have ended, alone: those that pass then are flaky, and a run bears FLAKY of them. After
LIMIT_S the lanes are interrupted, so that a run that takes too long says where its time went.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import waiting

TESTS = Path(__file__).parents[1]
FIRST = "test_sbatch_quickstart.py"
"""The longest test: nothing should wait for it at the end."""
FLAKY = 3
"""Tests that may fail in their lane and pass alone; with more of them the run fails."""
LIMIT_S = 4560.0
"""Seconds until the lanes are interrupted: time is left below the limit of .ci/run to end processes and to report."""
AGAIN_S = 40.0
"""Seconds until a lane that goes on is interrupted again: a test that handles the signal itself has swallowed it."""
SLOWEST = 25
"""Tests that the end of the run names, of all lanes."""

RANKS = ("trainer", "weights", "checkpoint", "parity", "lab")
"""Rooms whose tests start groups of ranks: half of what all rooms take."""

_STARTS_CLUSTER = re.compile(r"^from slurm_cluster import", re.M)


def chosen(tests: Path = TESTS) -> dict[str, list[str]]:
    """Arguments of pytest by lane, the longest first. Every test file is in one, that of a new room in `rooms`.

    Whole runs that need Slurm have a lane of their own: they share one cluster.
    """
    whole = sorted((tests / "runs").glob("test_*.py"), key=lambda path: (path.name != FIRST, path.name))
    # Each by its name: pytest leaves out a file whose folder is named as well, and with it its place in the order.
    slurm = [path for path in whole if _STARTS_CLUSTER.search(path.read_text())]
    runs = [path for path in whole if path not in slurm]
    ranks = [tests / room for room in RANKS]
    rooms = [tests, *(f"--ignore={path}" for path in [*whole, *ranks])]
    lanes = {"runs": runs, "slurm": slurm, "rooms": rooms, "ranks": ranks}
    return {name: [*map(str, words)] for name, words in lanes.items() if words}


def halves(tests: Path = TESTS) -> dict[str, list[str]]:
    """Arguments of pytest for `-m fast` in two lanes, every second test file in each: by name, so that rooms mix."""
    files = sorted(tests.rglob("test_*.py"), key=lambda file: (file.name, file))
    return {name: ["-m", "fast", *map(str, files[half::2])] for half, name in enumerate(("even", "odd"))}


_HEADING = re.compile(r"=+ (?!test session starts).* =+|=+")
_DURATION = re.compile(r"^ *(\d+\.\d+)s (call|setup|teardown) +(.+)$")
_COUNT = re.compile(r"(\d+) (failed|passed|skipped|deselected|xfailed|xpassed|warning|error)s?\b")


class Lane:
    """One session of pytest and what it says."""

    def __init__(self, name: str, arguments: Sequence[str]) -> None:
        self.name = name
        self.report: list[str] = []
        self.took_s = 0.0
        self._begun = time.monotonic()
        self._cache = tempfile.TemporaryDirectory(prefix="lane-")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-o", f"cache_dir={self._cache.name}", "--durations=20", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**os.environ, "COLUMNS": "300"},  # errors of the summary are cut there
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        for line in self._process.stdout:
            if self.report or _HEADING.fullmatch(line.strip()):
                self.report.append(line)
            else:
                print(f"{self.name:>5} | {line}", end="", flush=True)

    def wait(self) -> int:
        """The session's exit status."""
        self._reader.join()
        status = self._process.wait()
        self.took_s = self.took_s or time.monotonic() - self._begun
        return status

    def interrupt(self) -> None:
        """End the session as Ctrl-C does: it names the test that it was in, and shows what failed until then."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)

    def slowest(self) -> list[tuple[float, str]]:
        """Seconds and names of its slowest tests."""
        found = [_DURATION.match(line) for line in self.report]
        return [(float(each[1]), f"{each[2]} {each[3].strip()}") for each in found if each]

    def counts(self) -> Counter[str]:
        """How many tests passed, failed, ...; nothing where the session was cut off."""
        summaries = [line for line in self.report if re.search(r" in \d+\.\d+s", line)]
        return Counter({word: int(number) for number, word in _COUNT.findall(summaries[-1] if summaries else "")})

    def failed(self) -> dict[str, str]:
        """First error of each test that failed, by the test's name."""
        file = Path(self._cache.name, "v", "cache", "lastfailed")
        names = json.loads(file.read_text()) if file.exists() else {}
        summary = [line.strip().partition(" ")[2] for line in self.report if line.startswith(("FAILED ", "ERROR "))]
        said = {name: [line.removeprefix(name) for line in summary if line.startswith(name)] for name in names}
        return {name: "".join(found[:1]).removeprefix(" - ") for name, found in said.items()}

    def is_whole(self) -> bool:
        """Whether all of its tests ran, and nothing but tests failed; a session that was cut off says no counts."""
        if not self.counts():
            return False
        unlike_tests = any(line.startswith("SESSION FAILED") for line in self.report)
        return self.wait() == 0 or (self.wait() == 1 and bool(self.failed()) and not unlike_tests)


def run(lanes: Mapping[str, Sequence[str]], limit_s: float = LIMIT_S) -> int:
    """Run all lanes, then what failed once more, show what they said, and return the exit status of the whole."""
    begun = time.monotonic()
    running = _side_by_side(lanes, limit_s)
    total = sum((lane.counts() for lane in running), Counter[str]())
    errors = {name: error for lane in running for name, error in lane.failed().items()}
    broken = [f"{lane.name} ({lane.wait()})" for lane in running if not lane.is_whole()]
    broken += [f"{name} (not begun)" for name in sorted(lanes.keys() - {lane.name for lane in running})]
    flaky: list[str] = []
    if broken:
        broken += errors
    elif errors:
        again = Lane("again", list(errors))
        _show(again)
        failed = again.failed() if again.is_whole() else errors
        flaky = sorted(errors.keys() - failed.keys())
        broken += [*failed, *([f"{len(flaky)} flaky tests, at most {FLAKY} may be"] if len(flaky) > FLAKY else [])]
        total = Counter({**total, "passed": total["passed"] + len(flaky), "failed": len(failed), "error": 0})
        print(f"\n##### {len(flaky)} flaky: failed in their lane, passed alone")
        print("".join(f"  {name}\n    {errors[name]}\n" for name in flaky), end="")
    print("\n##### slowest of all lanes")
    slowest = sorted((each for lane in running for each in lane.slowest()), reverse=True)
    print("".join(f"{took:8.0f} s {name}\n" for took, name in slowest[:SLOWEST]), end="")
    print("##### lanes:", ", ".join(f"{lane.name} {lane.took_s:.0f} s ({lane.wait()})" for lane in running))
    counted = ", ".join(f"{number} {word}" for word, number in total.items() if number)
    verdict = f"FAILED: {', '.join(broken)}" if broken else "passed"
    alongside = f"; flaky: {', '.join(flaky)}" if flaky else ""
    print(f"\n##### all lanes: {counted} in {time.monotonic() - begun:.0f} s: {verdict}{alongside}", flush=True)
    return 1 if broken else 0


def _side_by_side(lanes: Mapping[str, Sequence[str]], limit_s: float) -> list[Lane]:
    """The lanes that could begin, each to its end or the limit: as many at a time as there are cores."""
    begun: list[Lane] = []
    over, ended = threading.Event(), threading.Event()

    def whole(name: str, arguments: Sequence[str]) -> Lane | None:
        if over.is_set():
            return None
        begun.append(lane := Lane(name, arguments))
        lane.wait()
        return lane

    def end() -> None:
        over.set()
        while not ended.is_set():
            for lane in begun:
                lane.interrupt()
            ended.wait(AGAIN_S)

    timer = threading.Timer(limit_s, end)
    timer.start()
    try:
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as cores:
            for future in as_completed([cores.submit(whole, *each) for each in lanes.items()]):
                if lane := future.result():
                    _show(lane)
    finally:
        timer.cancel()
        ended.set()
    return sorted(begun, key=lambda lane: [*lanes].index(lane.name))


def _show(lane: Lane) -> None:
    print(f"\n##### lane {lane.name}: exit status {lane.wait()}\n{''.join(lane.report)}", end="", flush=True)


if __name__ == "__main__":
    print(f"tests: this machine counts as {waiting.SLOWNESS:.1f} times slower than a quick one", flush=True)
    sys.exit(run(halves() if sys.argv[1:] == ["-m", "fast"] else chosen()))
