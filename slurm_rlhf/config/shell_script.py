"""Read the command in a shell script: its words, with the variables and arrays that the script assigns. Pure.

Nothing is run: what a command of the script would print, or the user's environment holds, stays `$NAME`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

from slurm_rlhf.errors import ConfigError

_HEREDOC = re.compile(r"<<-?[ \t]*['\"]?(\w+)['\"]?[^\n]*\n(.*?)\n[ \t]*\1[ \t]*(?:\n|$)", re.DOTALL)
_ARRAY = re.compile(
    r"^[ \t]*(?:declare -a |readonly |export )?(\w+)\+?=\((.*?)\)[ \t]*(?:#[^\n]*)?$", re.DOTALL | re.MULTILINE
)
_SCALAR = re.compile(
    r"^[ \t]*(?:export |readonly |local )?(\w+)=(\"[^\"\n]*\"|'[^'\n]*'|[^\s;#()\"'`]*)[ \t]*;?[ \t]*(?:#[^\n]*)?$",
    re.MULTILINE,
)
_USE = re.compile(r"\$(?:(\w+)|\{(\w+)(?:\[[@*]\])?(?::?-([^}]*))?\})")
_ENDS = ("|", "||", "&&", ";", "&", ">", ">>", "2>&1", "&>", "&>>", "<")
_DEPTH = 8  # variables that name variables


def commands(script: str) -> Iterator[list[str]]:
    """Yield the words of each command of a script: one for each part of a list or a pipe, without redirections.

    Raises ConfigError for quotes that do not close.
    """
    joined = script.replace("\\\r\n", " ").replace("\\\n", " ")
    bodies = [found[2] for found in _HEREDOC.finditer(joined)]
    text = _HEREDOC.sub("\n", joined)
    known: dict[str, list[str]] = {}
    for found in _ARRAY.finditer(text):
        known[found[1]] = known.get(found[1], []) + _split(found[2])
    text = _ARRAY.sub("", text)
    for found in _SCALAR.finditer(text):
        value = found[2]
        if "$(" not in value and "`" not in value:
            known.setdefault(found[1], [value.strip("\"'")])
    for command in [*_lines(text), *bodies]:
        words = [each for word in _split(command) for each in _expanded(word, known)]
        ends = [place for place, word in enumerate(words) if word in _ENDS]
        for first, last in zip([-1, *ends], [*ends, len(words)], strict=True):
            yield words[first + 1 : last]


def _lines(text: str) -> Iterator[str]:
    """Yield logical lines: a quote that is open goes on over the end of a line."""
    pending = ""
    for line in text.splitlines():
        pending = f"{pending}\n{line}" if pending else line
        try:
            shlex.split(pending, comments=True)
        except ValueError:
            continue
        yield pending
        pending = ""
    if pending:
        yield pending


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text, comments=True)
    except ValueError as error:
        raise ConfigError(f"the command cannot be read as a shell would: {error}") from None


def _expanded(word: str, known: dict[str, list[str]]) -> list[str]:
    """Replace variables in a word; an array, or a text that stands alone, becomes several words."""
    whole = _USE.fullmatch(word)
    if whole and len(values := known.get(whole[1] or whole[2], [])) > 1:
        return [each for value in values for each in _expanded(value, known)]
    for _ in range(_DEPTH):
        before = word
        word = _USE.sub(lambda found: _value(found, known), word)
        if word == before:
            break
    return [word]


def _value(found: re.Match[str], known: dict[str, list[str]]) -> str:
    values = known.get(found[1] or found[2])
    if values is not None:
        return " ".join(values)
    return found[0] if found[3] is None else found[3]
