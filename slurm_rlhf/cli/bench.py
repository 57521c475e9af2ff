"""Run `slurm-rlhf bench NAME`: measure how fast a part of a run is on this machine."""

from __future__ import annotations

import difflib
import importlib

from slurm_rlhf.cli.main import CommandPage
from slurm_rlhf.errors import ConfigError

BENCHES = {
    "rollout": "the rollout worker, compared with a plain LLM.generate",
    "train": "the update of the actor, compared with a plain DeepSpeed and transformers loop",
    "sync": "a weight update, compared with the raw transfer of its bytes and with one broadcast per parameter",
}
"""Name -> summary; the module `slurm_rlhf.bench.<name>_command` runs it."""

USAGE = "usage: slurm-rlhf bench NAME [FILE.toml] [--KEY=VALUE ...] [--OPTION=VALUE ...] [--json]"


class Bench:
    """Choose the bench that the first word names; each bench has its own options and help page."""

    def help_page(self) -> str:
        """Return all of `slurm-rlhf bench --help`: the list of benches, then the page of each."""
        width = max(map(len, BENCHES))
        names = "\n".join(f"  {name.ljust(width)}  {summary}" for name, summary in BENCHES.items())
        return "\n\n".join([f"{USAGE}\n\nbenches:\n{names}", *(_bench(name).help_page() for name in BENCHES)])

    def run(self, words: list[str]) -> int:
        """Run the bench that the first word names. Raises ConfigError."""
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


def _bench(name: str) -> CommandPage:
    command: CommandPage = importlib.import_module(f"slurm_rlhf.bench.{name}_command")
    return command


COMMANDS = {"bench": Bench()}
