"""Compare this checkout with another one: the numbers of four fixed runs must be equal bit for bit.

    .venv/bin/python tests/lab/against.py BASE_CHECKOUT [--only drain,dynamic,colocated,hf]

Each run (`fixed_runs.py`) is done with the code and the .venv of BASE_CHECKOUT, which saves in the middle; then with
this checkout from the start, and with this checkout from the base's checkpoint. Every metric that no clock measures,
every response with its log-probs, and the final weights must be the same. Prints a table, and for each run that
differs the first step and key; then exits with 1 and leaves the run directories.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fixed_runs

ROOT = Path(__file__).resolve().parents[2]
CLOCKS = ("time/", "perf/")
COUNTS = ("perf/sync_bytes", "perf/sync_group", "perf/engine/*/responses")
"""Metrics that begin like those of a clock and are counts."""
RESPONSE = ("prompt", "response", "finish_reason", "reward", "score", "advantage", "engine", "version", "logprobs")
Numbers = dict[str, str]
"""Key -> value as JSON, in which equal floats are equal text."""


def numbers(run_dir: Path) -> dict[int, Numbers]:
    """Read what a run has recorded of each step; the final weights count as a step behind the last."""
    found: dict[int, Numbers] = {}
    for row in _lines(run_dir / "metrics.jsonl"):
        fixed = {name for name in row if not name.startswith(CLOCKS)}
        fixed |= {name for name in row for pattern in COUNTS if fnmatch.fnmatch(name, pattern)}
        found.setdefault(row["step"], {}).update({name: json.dumps(row[name]) for name in fixed})
    for row in _lines(run_dir / "samples.jsonl"):
        where = f"response {row['sample']} to prompt {row['prompt_index']}, "
        found.setdefault(row["step"], {}).update({where + name: json.dumps(row.get(name)) for name in RESPONSE})
    found[fixed_runs.STEPS + 1] = dict(_weights(run_dir / "final"))
    return found


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    yield from map(json.loads, path.read_text(encoding="utf-8").splitlines())


def _weights(directory: Path) -> Iterator[tuple[str, str]]:
    from safetensors.numpy import load_file

    for file in sorted(directory.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            yield f"final weights, {name}", f"{tensor.dtype} {tensor.shape} {tensor.tobytes().hex()}"


def first_difference(base: dict[int, Numbers], ours: dict[int, Numbers], after: int = 0) -> str:
    """Name the first step, later than `after`, and the first key there that is not the base's; empty: all is equal.

    Keys that only this checkout records are no difference.
    """
    for step in range(after + 1, fixed_runs.STEPS + 2):
        theirs, found = base.get(step, {}), ours.get(step, {})
        if not theirs:
            return f"step {step}: the base has recorded nothing"
        differing = sorted(key for key, value in theirs.items() if found.get(key) != value)
        if differing:
            key = differing[0]
            values = [each.get(key, "nothing")[:60] for each in (theirs, found)]
            more = f" ({len(differing)} keys of {len(theirs)} differ)"
            return f"step {step}: {key}: base {values[0]}, here {values[1]}{more}"
    return ""


class Worker:
    """A process that does fixed runs with the code of one checkout, one after the other."""

    def __init__(self, checkout: Path) -> None:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self._process = subprocess.Popen(
            [checkout / ".venv" / "bin" / "python", Path(fixed_runs.__file__), checkout],
            cwd=checkout,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._thread = ThreadPoolExecutor(1)

    def start(self, config: Path, run_dir: Path, *words: str, after: Future[Path] | None = None) -> Future[Path]:
        """Begin a run when those before are done, and `after` is; return its directory when it has ended."""
        return self._thread.submit(self._run, config, run_dir, words, after)

    def _run(self, config: Path, run_dir: Path, words: Sequence[str], after: Future[Path] | None) -> Path:
        if after is not None:
            after.result()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"config": str(config), "run_dir": str(run_dir), "words": words}) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit(f"the process that runs {run_dir.parent.name} has ended before {run_dir.name}")
        done = json.loads(answer)
        if done["code"]:
            raise SystemExit(f"{run_dir} has failed:\n{done['output'][-4000:]}")
        return run_dir

    def close(self) -> None:
        """End the process when its last run is over."""
        self._thread.shutdown(cancel_futures=True)
        self._process.communicate()


def compare(base: Path, names: Sequence[str], directory: Path) -> dict[str, tuple[str, str]]:
    """Do all runs in `directory`; return the first difference of each from the start, and from the checkpoint."""
    inputs = directory / "inputs"
    inputs.mkdir()
    configs = fixed_runs.write_inputs(inputs)
    print(f"{'run':10} {'from start':12} from the base's checkpoint of step {fixed_runs.SAVED}", flush=True)
    theirs, ours = Worker(base), Worker(ROOT)
    try:
        stated = {name: theirs.start(configs[name], directory / "base" / name) for name in names}
        fresh = {name: ours.start(configs[name], directory / "fresh" / name) for name in names}
        resumed = {}
        for name in names:
            saved = directory / "base" / name / "checkpoints" / f"step_{fixed_runs.SAVED:06d}"
            resumed[name] = ours.start(
                configs[name], directory / "resumed" / name, f"--resume={saved}", after=stated[name]
            )
        found = {}
        for name in names:
            truth = numbers(stated[name].result())
            found[name] = (
                first_difference(truth, numbers(fresh[name].result())),
                first_difference(truth, numbers(resumed[name].result()), fixed_runs.SAVED),
            )
            print(f"{name:10} {_verdict(found[name][0]):12} {_verdict(found[name][1])}", flush=True)
        return found
    finally:
        theirs.close()
        ours.close()


def _verdict(difference: str) -> str:
    return "DIFFERS" if difference else "equal"


def main() -> int:
    """Compare, print and tell by the exit status whether all is equal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", type=Path, metavar="BASE_CHECKOUT", help="a checkout with a .venv of its own")
    parser.add_argument("--only", default=",".join(fixed_runs.RUNS), help="names of runs, with commas between them")
    options = parser.parse_args()
    names = options.only.split(",")
    if unknown := set(names) - set(fixed_runs.RUNS):
        parser.error(f"no such run: {', '.join(sorted(unknown))}; there are {', '.join(fixed_runs.RUNS)}")
    sys.path.append(str(ROOT / "tests" / "support"))
    directory = Path(tempfile.mkdtemp(prefix="against-"))
    found = compare(options.base.resolve(), names, directory)
    differing = [
        f"{name} {kind}: {difference}"
        for name, each in found.items()
        for kind, difference in zip(("from the start", "resumed"), each, strict=True)
        if difference
    ]
    if differing:
        print("\n".join([*differing, f"the runs are in {directory}"]))
        return 1
    shutil.rmtree(directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
