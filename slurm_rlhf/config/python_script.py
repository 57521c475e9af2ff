"""Read what a Python script of a trainer says: literal arguments of the calls that a table names. Nothing is run."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import Any

from slurm_rlhf.config.shell_script import Said, commands, settings
from slurm_rlhf.errors import ConfigError


def python_settings(script: str, table: Mapping[str, Any]) -> tuple[str, list[Said]]:
    """Return the program that a script's configuration class stands for, and what is said to it.

    `table`: a peer's, with `classes`, `calls` and `uses`. Where the class is not called but made from the command line,
    the flags are those of the first command in the script's docstring. Raises ConfigError for a script without such a
    class, with several, with one that is derived from it, or with neither call nor command.
    """
    tree = ast.parse(script)
    used = dict.fromkeys(node.id for node in ast.walk(tree) if isinstance(node, ast.Name))
    classes = [name for name in used if name in table["classes"]]
    bases = [(node.name, base) for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for base in node.bases]
    derived = [name for name, base in bases if isinstance(base, ast.Name) and base.id in classes]
    if len(classes) != 1 or derived:
        raise ConfigError(
            f"no script of {table['name']} that is known: it should have one of the classes "
            f"{', '.join(table['classes'])}, and has {' and '.join(derived or classes) or 'none'}"
        )
    known = _assigned(tree)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    found = [said for call in calls for said in _arguments(call, classes[0], table["calls"], known)]
    for name in used:
        found += [
            Said(each, [str(value)], name if value is True else "")
            for each, value in table["uses"].get(name, {}).items()
        ]
    if classes[0] not in map(_name, calls):
        flags = _flags_of_docstring(tree, table)
        if not flags:
            raise ConfigError(f"{classes[0]} is made from the command line: give migrate the command, with its flags")
        found = [*flags, *found]
    return table["classes"][classes[0]], [*found, *_attributes(tree, known)]


def _assigned(tree: ast.Module) -> dict[str, Any]:
    """Return the names that the script assigns, and assigns once, with the values of literals."""
    known: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value:
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            if isinstance(target, ast.Name):
                known[target.id] = None if target.id in known else _literal(node.value, known)
    return known


def _literal(node: ast.expr, known: Mapping[str, Any]) -> Any:
    """Return the value of a literal, of a name that has one, or of an f-string of them; None of anything else."""
    if isinstance(node, ast.Name):
        return known.get(node.id)
    if isinstance(node, ast.JoinedStr):
        parts = [_literal(part.value if isinstance(part, ast.FormattedValue) else part, known) for part in node.values]
        return None if None in parts else "".join(map(str, parts))
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(item, known) or ast.unparse(item) for item in node.elts]
    if isinstance(node, ast.Call) and _name(node) == "dict":
        return {keyword.arg: _words(keyword.value, known) for keyword in node.keywords}
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


def _arguments(call: ast.Call, own: str, calls: Mapping[str, Any], known: Mapping[str, Any]) -> Iterator[Said]:
    """Find the arguments of a call: all keywords of the class `own`, else those in the table of `calls`."""
    names: Mapping[str, str] = calls.get(_name(call), {})
    given = {str(place): argument for place, argument in enumerate(call.args)}
    given |= {keyword.arg or "**": keyword.value for keyword in call.keywords}
    for name, value in given.items():
        if _name(call) == own and name == "**" and isinstance(several := _literal(value, known), dict):
            yield from (Said(str(key), words, str(key)) for key, words in several.items() if isinstance(words, list))
        elif _name(call) == own and not name.isdigit():
            yield Said(name, _words(value, known), name)
        elif name in names and (names[name] == name or _literal(value, known) is not None):
            yield Said(names[name], _words(value, known), names[name])


def _name(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _attributes(tree: ast.Module, known: Mapping[str, Any]) -> Iterator[Said]:
    """Find what is set afterwards, as in `training_args.max_steps = 3`."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign) or not isinstance(target := node.targets[0], ast.Attribute):
            continue
        if isinstance(target.value, ast.Name) and "args" in target.value.id:
            yield Said(target.attr, _words(node.value, known), target.attr)


def _flags_of_docstring(tree: ast.Module, table: Mapping[str, Any]) -> list[Said]:
    for line in (ast.get_docstring(tree) or "").replace("\\\n", " ").splitlines():
        words = next(commands(line), []) if ".py " in line else []
        place = next((place for place, word in enumerate(words) if word.endswith(".py")), len(words))
        if flags := settings(words, place, table):
            return flags
    return []
