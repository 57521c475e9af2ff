"""Run the default tests as several sessions of pytest side by side; tests/run.sh starts this file.

Most tests wait for processes, so that one session leaves cores idle. Each lane is a whole session: its own mark of
processes, its own check of what was skipped or left running. What a lane says about its tests is shown line by line,
with the lane's name in front; its failures and warnings follow in one piece when it has ended.
"""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

TESTS = Path(__file__).parents[1]
FIRST = "test_sbatch_quickstart.py"
"""What suffers most from a busy machine runs while the lane of the rooms is at what starts no process."""

_STARTS_CLUSTER = re.compile(r"^from slurm_cluster import", re.M)


def chosen(tests: Path = TESTS) -> dict[str, list[str]]:
    """Arguments of pytest by lane. Every test file is in one of them: a new one of `runs` there, all others in `rooms`.

    Whole runs that need Slurm have a lane of their own: most of their time is Slurm's, which waits, and they share one
    cluster.
    """
    whole = sorted((tests / "runs").glob("test_*.py"), key=lambda path: (path.name != FIRST, path.name))
    # Each by its name: pytest leaves out a file whose folder is named as well, and with it its place in the order.
    slurm = [path for path in whole if _STARTS_CLUSTER.search(path.read_text())]
    runs = [path for path in whole if path not in slurm]
    lanes = {"runs": runs, "slurm": slurm, "rooms": [tests, *(f"--ignore={path}" for path in whole)]}
    return {name: [*map(str, words)] for name, words in lanes.items() if words}


_HEADING = re.compile(r"=+ (?!test session starts).* =+|=+")
_COUNT = re.compile(r"(\d+) (failed|passed|skipped|deselected|xfailed|xpassed|warning|error)s?\b")


class Lane:
    """One session of pytest and what it says."""

    def __init__(self, name: str, arguments: Sequence[str]) -> None:
        self.name = name
        self.report: list[str] = []
        self._process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if self.report or _HEADING.fullmatch(line.strip()):
                self.report.append(line)
            else:
                print(f"{self.name:>5} | {line}", end="", flush=True)

    def wait(self) -> int:
        """The session's exit status."""
        self._reader.join()
        return self._process.wait()

    def counts(self) -> Counter[str]:
        """How many tests passed, failed, ...; nothing where the session was cut off."""
        summaries = [line for line in self.report if re.search(r" in \d+\.\d+s", line)]
        return Counter({word: int(number) for number, word in _COUNT.findall(summaries[-1] if summaries else "")})


def run(lanes: Mapping[str, Sequence[str]]) -> int:
    """Run all lanes, show what they said, and return the exit status of one that failed, else 0."""
    begun = time.monotonic()
    running = [Lane(name, arguments) for name, arguments in lanes.items()]
    statuses, total = {}, Counter[str]()
    with ThreadPoolExecutor(len(running)) as waiting:
        for ended in as_completed([waiting.submit(lambda lane: (lane, lane.wait()), lane) for lane in running]):
            lane, statuses[lane.name] = ended.result()
            total += lane.counts()
            report = "".join(lane.report)
            print(f"\n##### lane {lane.name}: exit status {statuses[lane.name]}\n{report}", end="", flush=True)
    counted = ", ".join(f"{number} {word}" for word, number in total.items())
    failed = [f"{name} ({status})" for name, status in statuses.items() if status]
    said = f"FAILED: {', '.join(failed)}" if failed else "passed"
    print(f"\n##### all lanes: {counted} in {time.monotonic() - begun:.0f} s: {said}", flush=True)
    return max(statuses.values(), key=abs)


if __name__ == "__main__":
    sys.exit(run(chosen()))
