"""Files that a reader sees whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def write_atomically(path: Path, text: str, *, durable: bool = False, private: bool = False) -> None:
    """Replace `path` by a file with `text`, in one step. Raises OSError, and leaves an earlier file as it was then.

    `durable`: the file outlives a crash of the node. `private`: only the owner can read it, at any moment.
    """
    temporary = path.with_name(f".{path.name}.{os.urandom(8).hex()}.tmp")
    # O_EXCL: never through somebody's link.
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o666)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            if private:
                os.fchmod(file.fileno(), 0o600)
            file.write(text)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
