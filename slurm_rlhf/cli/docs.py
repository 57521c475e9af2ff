"""Run `slurm-rlhf docs [TOPIC]`, which shows a page, and `completion SHELL`, which completes commands and keys."""

from __future__ import annotations

import sys
from typing import ClassVar

from slurm_rlhf.cli.commands import WIDEST, Arguments, commands, filled, unknown
from slurm_rlhf.config.keys import all_keys
from slurm_rlhf.docs.pages import TOPICS, contents, page


def show_docs(arguments: Arguments) -> int:
    """Print the list of pages, or one page: formatted on a terminal, else as Markdown."""
    if not arguments.words:
        print(f"{arguments.command.usage_line}\n\n{contents()}")
        return 0
    if len(arguments.words) > 1:
        raise arguments.error(f"one topic at a time; the topics are {', '.join(TOPICS)}")
    text = page(arguments.words[0].removesuffix(".md").replace("-", "_"))
    if sys.stdout.isatty():
        _show(text)
    else:
        print(text, end="")
    return 0


def _show(text: str) -> None:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.markdown import Markdown, TableElement

    class Folded(TableElement):
        """Break words that are longer than their column. Rich would cut them, and half a key is of no use."""

        def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
            for table in super().__rich_console__(console, options):
                for column in table.columns:  # type: ignore[union-attr]
                    column.overflow = "fold"
                yield table

    class Page(Markdown):
        elements: ClassVar = {**Markdown.elements, "table_open": Folded}

    console = Console()
    console.print(Page(text), width=min(console.width, WIDEST))


def script() -> str:
    """Return a script for bash that completes commands, keys and their choices, topics of the documentation, files."""
    choices: dict[str, list[str]] = {}
    for key in all_keys().values():
        words = [choice for choice in key.choices if choice] or (["true", "false"] if key.kind == "bool" else [])
        if words:
            choices.setdefault(" ".join(words), []).append(f"--{key.name}")
    values = "\n".join(
        f'    {"|".join(names)}) COMPREPLY=($(compgen -W "{words}" -- "$word")) ;;' for words, names in choices.items()
    )
    keys = " ".join(f"--{name}=" for name in all_keys())
    names = " ".join(name for name in commands() if " " not in name)
    return filled("completion.bash.txt", commands=names, values=values, topics=" ".join(TOPICS), keys=keys)


def completion(arguments: Arguments) -> int:
    """Print the script for a shell. Raises ConfigError for another shell than bash and zsh."""
    shell = " ".join(arguments.words)
    if shell not in ("bash", "zsh"):
        raise arguments.error(f"no completion for {unknown(shell, ['bash', 'zsh'])}")
    zsh = "autoload -U +X bashcompinit && bashcompinit\n" if shell == "zsh" else ""
    print(zsh + script(), end="")
    return 0
