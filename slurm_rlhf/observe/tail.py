from __future__ import annotations
from pathlib import Path
def tail(path: Path, lines: int) -> list[str]:
    return path.read_text(errors="replace").splitlines()[-lines:]
