"""`slurm-rlhf bench NAME`: how fast a part of a run is on this machine."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import json
import os
import sys
from typing import Any, Protocol

from slurm_rlhf.bench.options import BENCHES, Given, read
from slurm_rlhf.errors import ConfigError

USAGE = "usage: slurm-rlhf bench NAME [FILE.toml] [--KEY=VALUE ...] [--OPTION=VALUE ...] [--json]"


class BenchModule(Protocol):
    """What the module of a bench, `slurm_rlhf.bench.<name>`, offers."""

    def run(self, given: Given) -> dict[str, Any]:
        """Measure."""

    def show(self, result: dict[str, Any]) -> str:
        """Write the results for a reader."""


def help_page() -> str:
    """Write `slurm-rlhf bench --help`: what there is, then the page of each."""
    width = max(map(len, BENCHES))
    names = "\n".join(f"  {name.ljust(width)}  {bench.summary}" for name, bench in BENCHES.items())
    return "\n\n".join([f"{USAGE}\n\nbenches:\n{names}", *(bench.help_page() for bench in BENCHES.values())])


def run(words: list[str]) -> int:
    """Run the bench that the first word names. Raises ConfigError, and what the bench raises."""
    if not words or words[0] not in BENCHES:
        given = words[0] if words else ""
        near = difflib.get_close_matches(given, BENCHES, n=1)
        meant = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"bench: unknown bench {given!r}{meant} (benches: {', '.join(BENCHES)})\n{USAGE}")
    bench = BENCHES[words[0]]
    if "-h" in words or "--help" in words:
        print(bench.help_page(), end="")
        return 0
    options = read(bench, words[1:])
    if "threads" in options.options:  # before torch is imported: that is when it counts
        os.environ["OMP_NUM_THREADS"] = str(options.options["threads"])
    # What libraries print meanwhile goes to standard error: standard output is the result's.
    with contextlib.redirect_stdout(sys.stderr):
        module: BenchModule = importlib.import_module(f"slurm_rlhf.bench.{bench.name}")
        result = module.run(options)
    print(json.dumps(result) if options.json else module.show(result))
    return 0
