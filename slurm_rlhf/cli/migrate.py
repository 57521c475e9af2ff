"""Run `slurm-rlhf migrate openrlhf 'COMMAND'`: print the TOML file that a command of OpenRLHF is here."""

from __future__ import annotations

import sys
from pathlib import Path

from slurm_rlhf.cli.main import Command
from slurm_rlhf.config.migrate import translate
from slurm_rlhf.errors import ConfigError

USAGE = "usage: slurm-rlhf migrate openrlhf 'COMMAND' | FILE.sh | - (standard input)"


def run(words: list[str]) -> int:
    """Print TOML on stdout, and on stderr how much of the command it holds."""
    if len(words) < 2 or words[0] != "openrlhf":
        raise ConfigError(f"what is to be translated?\n{USAGE}")
    found = translate(_command(words[1:]))
    print(found.toml(), end="")
    flags = len(found.values) + len(found.left_out)
    print(
        f"{len(found.values)} of {flags} flags translated; the others are at the end, with what to do", file=sys.stderr
    )
    return 0


def _command(words: list[str]) -> str:
    if words == ["-"]:
        return sys.stdin.read()
    if len(words) == 1 and " " not in words[0]:
        try:
            return Path(words[0]).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{words[0]} cannot be read: {error}\n{USAGE}") from None
    return " ".join(words)


COMMANDS = {
    "migrate": Command(
        USAGE,
        "Translates a command of OpenRLHF into the TOML file that it is here, and prints it. Flags without a meaning "
        "here stand at the end, with what to do instead.",
        run,
    )
}
