"""Run `slurm-rlhf docs [TOPIC]`: show a page of the documentation."""

from __future__ import annotations

import sys

from slurm_rlhf.cli.main import WIDEST, Command
from slurm_rlhf.docs.pages import contents, page
from slurm_rlhf.errors import ConfigError

USAGE = "usage: slurm-rlhf docs [TOPIC]"


def run(words: list[str]) -> int:
    """Print the list of pages, or one page: formatted on a terminal, as Markdown into a file or a pipe."""
    if not words:
        print(f"{USAGE}\n\n{contents()}")
        return 0
    if len(words) > 1:
        raise ConfigError(f"one topic at a time\n{USAGE}\n\n{contents()}")
    text = page(words[0].removesuffix(".md").replace("-", "_"))
    if sys.stdout.isatty():
        _show(text)
    else:
        print(text, end="")
    return 0


def _show(text: str) -> None:
    from rich.console import Console
    from rich.markdown import Markdown

    console = Console()
    console.print(Markdown(text), width=min(console.width, WIDEST))


COMMANDS = {"docs": Command(USAGE, "Shows a page of the documentation; without TOPIC, the list of topics.", run)}
