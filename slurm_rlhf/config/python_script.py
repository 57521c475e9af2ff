"""Read what a Python script of a trainer says: literal arguments of the calls that a table names. Nothing is run."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from typing import Any

from slurm_rlhf.config.shell_script import Setting, commands, settings
from slurm_rlhf.errors import ConfigError


def python_settings(script: str, table: Mapping[str, Any]) -> tuple[str, list[Setting]]:
    """Return the program that a script's configuration class stands for, and what is said to it.

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
    known = _known(assigned)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    found = [said for call in calls for said in _arguments(call, classes[0], table["calls"], known)]
    uses = [(name, *row) for name in used for row in table["uses"].get(name, {}).items()]
    found += [Setting(each, [str(value)], name if value is True else "") for name, each, value in uses]
    command = re.search(r"\.py (.*--.*)", (ast.get_docstring(tree) or "").replace("\\\n", " "))
    called = classes[0] in map(_name, calls)
    flags = settings(next(commands(command[1]), []), -1, {}) if command and not called else []
    if not called and not flags:
        raise ConfigError(f"{classes[0]} is made from the command line: give migrate the command, with its flags")
    return table["classes"][classes[0]], [*_attributes(assigned, known), *flags, *found]


def _known(assigned: list[tuple[ast.expr, ast.expr]]) -> dict[str, Any]:
    """Return the names that the script assigns, and assigns once, with the values of literals."""
    known: dict[str, Any] = {}
    for target, value in assigned:
        if isinstance(target, ast.Name):
            known[target.id] = None if target.id in known else _literal(value, known)
    return known


def _attributes(assigned: list[tuple[ast.expr, ast.expr]], known: Mapping[str, Any]) -> Iterator[Setting]:
    """Find what is set afterwards, as in `training_args.max_steps = 3`."""
    for target, value in assigned:
        if isinstance(target, ast.Attribute) and "args" in ast.unparse(target.value):
            yield Setting(target.attr, _words(value, known), target.attr)


def _literal(node: ast.expr, known: Mapping[str, Any]) -> Any:
    """Return the value of a literal, of a name that has one, or of an f-string of them; None of anything else."""
    if isinstance(node, ast.Name):
        return known.get(node.id)
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
    """Return the words of an expression; of one that is computed its text, as a variable of a shell is written."""
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
