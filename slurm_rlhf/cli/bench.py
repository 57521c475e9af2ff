"""Run `slurm-rlhf bench NAME`: measure how fast a part of a run is on this machine."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
from typing import Any, Protocol

from slurm_rlhf.bench.options import BENCHES, Given, read
from slurm_rlhf.cli.main import unknown
from slurm_rlhf.errors import ConfigError

USAGE = "usage: slurm-rlhf bench NAME [FILE.toml] [--KEY=VALUE ...] [--OPTION=VALUE ...] [--json]"


class BenchModule(Protocol):
    """Measure, and write the results: what the module `slurm_rlhf.bench.<name>` of a bench offers."""

    def run_bench(self, given: Given) -> dict[str, Any]:
        """Measure what the options ask for."""

    def show(self, result: dict[str, Any]) -> str:
        """Write the results for a reader."""


class BenchCommand:
    """Choose the bench that the first word names; each bench has its own options and help page."""

    def help_page(self) -> str:
        """Return all of `slurm-rlhf bench --help`: the list of benches, then the page of each."""
        width = max(map(len, BENCHES))
        names = "\n".join(f"  {name.ljust(width)}  {bench.summary}" for name, bench in BENCHES.items())
        return "\n\n".join([f"{USAGE}\n\nbenches:\n{names}", *(bench.help_page() for bench in BENCHES.values())])

    def run(self, words: list[str]) -> int:
        """Run the bench that the first word names. Raises ConfigError, and what the bench raises."""
        if not words or words[0] not in BENCHES:
            name = words[0] if words else ""
            raise ConfigError(f"bench: unknown bench {unknown(name, BENCHES)} (benches: {', '.join(BENCHES)})\n{USAGE}")
        bench = BENCHES[words[0]]
        if "-h" in words or "--help" in words:
            print(bench.help_page(), end="")
            return 0
        given = read(bench, words[1:])
        if "threads" in given.options:  # before torch is imported: that is when it counts
            os.environ["OMP_NUM_THREADS"] = str(given.options["threads"])
        # What libraries print meanwhile goes to standard error: standard output is for the results.
        with contextlib.redirect_stdout(sys.stderr):
            module: BenchModule = importlib.import_module(f"slurm_rlhf.bench.{bench.name}")
            result = module.run_bench(given)
        print(json.dumps(result) if given.json else module.show(result))
        return 0


COMMANDS = {"bench": BenchCommand()}
