"""Config -> TOML that `load_config` reads back to the same Config."""

from __future__ import annotations

import json
from typing import Any

from slurm_rlhf.config.keys import all_keys, get
from slurm_rlhf.config.schema import Config


def dump_toml(config: Config) -> str:
    """Every key with its value, one TOML table per group, in the schema's order."""
    lines: list[str] = []
    group = ""
    for key in all_keys().values():
        if key.group != group:
            group = key.group
            lines += ["", f"[{group}]"]
        lines.append(f"{key.name.rpartition('.')[2]} = {_literal(get(config, key.name))}")
    return "\n".join(lines) + "\n"


def _literal(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        # JSON escapes what TOML wants escaped, but for DEL.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list):
        return f"[{', '.join(_literal(item) for item in value)}]"
    return repr(value)
