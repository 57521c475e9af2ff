"""Read a script of a trainer, by text alone: the command in a shell script, or the arguments in a Python script.

The words of a command come with the variables and arrays that the script assigns, and literal arguments with the calls
that a table names. Nothing is run: what a command of the script would print, or the user's environment holds, stays
`$NAME`. The home directory is `~`, and sums of whole numbers are computed.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from operator import add, floordiv, mul, sub
from typing import Any, NamedTuple

from slurm_rlhf.errors import ConfigError

_HEREDOC = re.compile(r"<<-?[ \t]*['\"]?(\w+)['\"]?[^\n]*\n(.*?)\n[ \t]*\1[ \t]*(?:\n|$)", re.DOTALL)
_ARRAY = re.compile(
    r"^[ \t]*(?:declare -a |readonly |export )?(\w+)(\+?)=\((.*?)\)[ \t]*(?:#[^\n]*)?$", re.DOTALL | re.MULTILINE
)
_SUM = re.compile(r"\$\(\(((?:[^()\n]|\([^()\n]*\))*)\)\)")
_SCALAR = re.compile(
    r"^[ \t]*(?:export |readonly |local )?(\w+)=("
    rf"\"[^\"]*\"|'[^']*'|{_SUM.pattern}|\$\{{\w+:?-\"[^\"\n]*\"\}}|[^\s;#()\"'`]*)[ \t]*;?[ \t]*(?:#[^\n]*)?$",
    re.MULTILINE,
)
_USE = re.compile(r"\$(?:(\w+)|\{(\w+)(?:\[[@*]\])?(?::?-([^${}]*))?\})")
_CONTINUED = re.compile(r"\\[ \t]*(?:[ \t]#[^\n]*)?\r?\n")
_ARGUMENTS = re.compile(r'"\$(?:[@*]|\{[@*](?::\d+)?\})"|\$(?:[@*]|\{[@*](?::\d+)?\})')
_ENDS = ("|", "||", "&&", ";", "&", ">", ">>", "2>&1", "&>", "&>>", "<")
_DEPTH = 8  # variables that name variables
_OPERATORS: dict[Any, Any] = {ast.Add: add, ast.Sub: sub, ast.Mult: mul, ast.FloorDiv: floordiv}
_HYDRA = re.compile(r"\+{0,2}(\w+(?:\.\w+)*)=(.*)", re.DOTALL)
_BREAK = re.compile(r"(?:^|;)[ \t]*(then|else|fi|esac)(?=[ \t;]|$)|(;;)", re.MULTILINE)
_PATTERN = re.compile(r"[ \t]*\(?([^()=$;#]+)\)(.*)")
_TEST = re.compile(r"\[\[? +(?:-([nz]) +(\S*)|(\S+) +(==?|!=) +(\S+)) +\]\]?")


@dataclass(slots=True)
class _Branches:
    """Holds an `if`, or a `case` with its word, which is open."""

    word: str | None
    now: bool = False  # the lines that follow are run
    done: bool = False  # a branch is found

    def turn(self, wanted: bool) -> None:
        """Begin a branch; the first branch that is `wanted` is run, no other."""
        self.now = wanted and not self.done
        self.done |= wanted


class Setting(NamedTuple):
    """Holds a setting of a program: a name and its words."""

    name: str
    words: list[str]
    flag: str  # the name as it was written, with its dashes; empty: nobody wrote it

    @property
    def unknown(self) -> bool:
        """Tell whether the script lacks the value, such as that of a shell variable which it does not assign."""
        return any("$" in word for word in self.words)


def settings(words: list[str], program: int, table: Mapping[str, Any]) -> list[Setting]:
    """Return the flags after the program, which is word number `program`, and those of its launcher in `table`.

    They look like `--a.b=c`, `--a.b c d`, `--a.b`, `a.b=c` and `+a.b=c` (Hydra's).
    """
    before = [said for said in _said(words[: max(program, 0)]) if said.name in table.get("launcher", ())]
    return [said._replace(words=said.words[:1]) for said in before] + _said(words[program + 1 :])


def _said(words: list[str]) -> list[Setting]:
    found: list[Setting] = []
    for word in words:
        name, equals, value = word.partition("=")
        if word.startswith("--") and word != "--":
            found.append(Setting(name[2:].replace("-", "_"), [value] if equals else [], name))
        elif of_hydra := _HYDRA.fullmatch(word):
            found.append(Setting(of_hydra[1], [of_hydra[2]], name))
        elif found:
            found[-1].words.append(word)
    return found


def commands(script: str) -> Iterator[list[str]]:
    """Yield the words of each command of a script: one for each part of a list or a pipe, without redirections.

    Raises ConfigError for quotes that do not close.
    """
    joined = _ARGUMENTS.sub("", _CONTINUED.sub(" ", script))
    bodies = [found[2] for found in _HEREDOC.finditer(joined)]
    text = _HEREDOC.sub("\n", joined)
    known = {"HOME": ["~"], "PWD": ["."]}
    text = "\n".join(_taken(text, known))
    for found in _ARRAY.finditer(text):
        known[found[1]] = known.get(found[1], []) * bool(found[2]) + _split(found[3])
    text = _ARRAY.sub("", text)
    for command in [*_lines(text), *bodies]:
        words = [each for word in _split(command) for each in _expanded(word, known)]
        ends = [place for place, word in enumerate(words) if word in _ENDS]
        for first, last in zip([-1, *ends], [*ends, len(words)], strict=True):
            yield words[first + 1 : last]


def _taken(text: str, known: dict[str, list[str]]) -> Iterator[str]:
    """Yield the lines that are run, with sums computed, and put what they assign into `known`.

    Where the script alone does not decide between branches, the first one is run.
    """
    levels: list[_Branches] = []
    for whole in _lines(_BREAK.sub(r"\n\1\2\n", text)):
        line = _computed(whole, known)
        word, _, rest = line.strip().partition(" ")
        if word in ("if", "case"):
            levels.append(
                _Branches(_replaced(rest.removesuffix(" in").strip("\"' "), known) if word == "case" else None)
            )
        elif levels and word in ("fi", "esac"):
            levels.pop()
        elif levels and word == ";;":
            levels[-1].now = False
        elif levels and (one := levels[-1]).word is not None and not one.now and (found := _PATTERN.match(line)):
            one.turn("$" in one.word or any(fnmatch(one.word, each.strip(" \"'")) for each in found[1].split("|")))
            line = found[2]
        if levels and word in ("if", "elif", "else"):
            levels[-1].turn(word == "else" or _holds(rest, known))
        elif all(level.now for level in levels) and word not in ("then", "fi", "esac", ";;"):
            if (said := _SCALAR.match(line)) and "$(" not in said[2] and "`" not in said[2]:
                known[said[1]] = [_replaced(said[2].strip("\"'"), known)]
            yield line


def _holds(condition: str, known: dict[str, list[str]]) -> bool:
    """Judge a condition: a variable that the script does not assign is empty, and equal to no text.

    A condition that is no comparison of texts counts as true.
    """
    tests = []
    for kind, text, left, sign, right in _TEST.findall(_replaced(condition, known)):
        one, other = (part.strip("\"'") for part in (left or text, right))
        tests.append((one == other or (kind != "" and "$" in one)) is (kind == "z" or sign in ("=", "==")))
    return (all if "&&" in condition else any)(tests or [True])


def _computed(text: str, known: dict[str, list[str]]) -> str:
    """Replace sums, `$((1024 * 8))`, by their numbers; one with an unknown variable stays, without its spaces."""

    def number(found: re.Match[str]) -> str:
        whole = _replaced(found[1], known).strip().replace("/", "//")
        try:
            return str(_number(ast.parse(whole, mode="eval").body, known))
        except (SyntaxError, ValueError, ZeroDivisionError, KeyError):
            return found[0].replace(" ", "")

    return _SUM.sub(number, text)


def _number(node: ast.expr, known: dict[str, list[str]]) -> int:
    """Compute a sum. Raises ValueError or KeyError for anything but whole numbers and their operators."""
    if isinstance(node, ast.BinOp):
        return int(_OPERATORS[type(node.op)](_number(node.left, known), _number(node.right, known)))
    return int(known[node.id][0] if isinstance(node, ast.Name) else ast.unparse(node))


def _lines(text: str) -> Iterator[str]:
    """Yield logical lines: a quote that is open at the end of a line continues in the next one."""
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
    """Replace variables in a word; an array, or a text of several lines, becomes several words."""
    whole = _USE.fullmatch(word)
    if whole and (len(values := known.get(whole[1] or whole[2], [""])) != 1 or "\n" in values[0]):
        parts = [part for value in values for part in (value.split() if "\n" in value else [value])]
        return [each for part in parts for each in _expanded(part, known)]
    return [_replaced(word, known)]


def _replaced(word: str, known: dict[str, list[str]]) -> str:
    """Replace variables, and those in their values and defaults; an unknown one stays."""
    for _ in range(_DEPTH):
        before, word = word, _USE.sub(lambda found: _value(found, known), word)
        if word == before:
            break
    return word


def _value(found: re.Match[str], known: dict[str, list[str]]) -> str:
    values = known.get(found[1] or found[2])
    if values is not None and (any(values) or found[3] is None):
        return " ".join(values)
    return found[0] if found[3] is None else found[3].strip("\"'")


def python_settings(script: str, table: Mapping[str, Any]) -> tuple[str, list[Setting]]:
    """Return the program that a script's configuration class stands for, and its settings.

    `table`: a peer's, with `classes`, `calls` and `uses`. Where the class is not called but made from the command line,
    the flags are those of the first command in the script's docstring. Raises ConfigError for a script that is no
    Python, without such a class, with several, with one derived from it, or with neither call nor command.
    """
    try:
        tree = ast.parse(script)
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"the script cannot be read as Python: {error}") from None
    used = dict.fromkeys(node.id for node in ast.walk(tree) if isinstance(node, ast.Name))
    classes = [name for name in used if name in table["classes"]]
    defined = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    derived = [node.name for node in defined if {ast.unparse(base) for base in node.bases} & set(classes)]
    if len(classes) != 1 or derived:
        has = " and ".join(derived or classes) or "none"
        raise ConfigError(f"no script of {table['name']} that is known: migrate reads {table['reads']}; this has {has}")
    assigned = [(node.targets[0], node.value) for node in ast.walk(tree) if isinstance(node, ast.Assign)]
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    known = _known(assigned, [call for call in calls if _name(call) == "add_argument"])
    found = [said for call in calls for said in _arguments(call, classes[0], table["calls"], known)]
    uses = [(name, *row) for name in used for row in table["uses"].get(name, {}).items()]
    found += [Setting(each, [str(value)], name if value is True else "") for name, each, value in uses]
    command = re.search(r"\.py (.*--.*)", (ast.get_docstring(tree) or "").replace("\\\n", " "))
    called = classes[0] in map(_name, calls)
    flags = settings(next(commands(command[1]), []), -1, {}) if command and not called else []
    if not called and not flags:
        raise ConfigError(f"{classes[0]} is made from the command line: give migrate the command, with its flags")
    return table["classes"][classes[0]], [*_attributes(assigned, known), *flags, *found]


def _known(assigned: list[tuple[ast.expr, ast.expr]], options: list[ast.Call]) -> dict[str, Any]:
    """Return the literal values of the names that the script assigns exactly once.

    `args.NAME` has the default of the script's own option NAME.
    """
    known: dict[str, Any] = {}
    for call in options:
        name = str(_literal(call.args[0], {}) if call.args else "").lstrip("-").replace("-", "_")
        known |= {f"args.{name}": _literal(each.value, {}) for each in call.keywords if each.arg == "default"}
    for target, value in assigned:
        if isinstance(target, ast.Name):
            known[target.id] = None if target.id in known else _literal(value, known)
    return known


def _attributes(assigned: list[tuple[ast.expr, ast.expr]], known: Mapping[str, Any]) -> Iterator[Setting]:
    """Find settings that are assigned afterwards, as in `training_args.max_steps = 3`."""
    for target, value in assigned:
        if isinstance(target, ast.Attribute) and "args" in ast.unparse(target.value):
            yield Setting(target.attr, _words(value, known), target.attr)


def _literal(node: ast.expr, known: Mapping[str, Any]) -> Any:
    """Return the value of a literal, of a name that has one, or of an f-string of these; None for anything else."""
    if isinstance(node, ast.Name | ast.Attribute):
        return known.get(ast.unparse(node))
    if isinstance(node, ast.JoinedStr):
        parts = [_literal(part.value if isinstance(part, ast.FormattedValue) else part, known) for part in node.values]
        return None if None in parts else "".join(map(str, parts))
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(item, known) or ast.unparse(item) for item in node.elts]
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError):
        return None


def _words(node: ast.expr, known: Mapping[str, Any]) -> list[str]:
    """Return the words of an expression; one that has to be computed becomes `${EXPRESSION}`, as a shell variable."""
    value = _literal(node, known)
    if value is None and not (isinstance(node, ast.Constant) and node.value is None):
        return [f"${{{ast.unparse(node)}}}"]
    return [str(item) for item in (value if isinstance(value, list) else [value])]


def _arguments(call: ast.Call, own: str, calls: Mapping[str, Any], known: Mapping[str, Any]) -> Iterator[Setting]:
    """Find the arguments of a call: all keywords of the class `own`, else those in the table of `calls`."""
    names: Mapping[str, str] = calls.get(_name(call), {})
    given = {str(place): argument for place, argument in enumerate(call.args)}
    given |= {keyword.arg or "**": keyword.value for keyword in call.keywords}
    for name, value in given.items():
        theirs = name if _name(call) == own and not name.isdigit() else names.get(name, "")
        if theirs and (theirs == name or _literal(value, known) is not None):
            yield Setting(theirs, _words(value, known), theirs)


def _name(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
