"""`slurm-rlhf bench NAME`: how fast a part of a run is on this machine."""

from __future__ import annotations

import difflib
import importlib

from slurm_rlhf.cli.main import Command
from slurm_rlhf.errors import ConfigError

BENCHES = {
    "rollout": "the rollout worker against a bare LLM.generate",
    "train": "the actor's update against a bare DeepSpeed and transformers loop",
    "sync": "a weight update against the raw transfer of its bytes, and against the naive way",
}
"""Name -> summary; `slurm_rlhf.cli.bench_<name>` is its Command."""

USAGE = "usage: slurm-rlhf bench NAME [FILE.toml] [--KEY=VALUE ...] [--OPTION=VALUE ...] [--json]"


def help_page() -> str:
    """All of `slurm-rlhf bench --help`: what there is, then the page of each."""
    width = max(map(len, BENCHES))
    names = "\n".join(f"  {name.ljust(width)}  {summary}" for name, summary in BENCHES.items())
    return "\n\n".join([f"{USAGE}\n\nbenches:\n{names}", *(_bench(name).help_page() for name in BENCHES)])


def run(words: list[str]) -> int:
    """Runs the bench that the first word names. Raises ConfigError."""
    if not words or words[0] not in BENCHES:
        given = words[0] if words else ""
        near = difflib.get_close_matches(given, BENCHES, n=1)
        meant = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"bench: unknown bench {given!r}{meant} (benches: {', '.join(BENCHES)})\n{USAGE}")
    bench = _bench(words[0])
    if "-h" in words or "--help" in words:
        print(bench.help_page(), end="")
        return 0
    return bench.run(words[1:])


def _bench(name: str) -> Command:
    command: Command = importlib.import_module(f"slurm_rlhf.bench.{name}_command")
    return command
