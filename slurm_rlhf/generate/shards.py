"""Divide a file among the tasks of a job array: task i of n has the rows i, i + n, i + 2n, ..."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from slurm_rlhf.errors import ConfigError

SPLIT = "shards.json"
"""Name of the file in the run directory that keeps the number of parts."""
ID, COUNT, LAST = "SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_COUNT", "SLURM_ARRAY_TASK_MAX"


@dataclass(frozen=True, slots=True)
class RowShard:
    """Names the part of the rows that a job answers."""

    index: int = 0
    count: int = 1

    def rows(self, total: int) -> range:
        """Return the numbers of its rows."""
        return range(self.index, total, self.count)

    def directory(self, root: Path) -> Path:
        """Return the directory of its files: `root` itself if the rows are not divided."""
        return root / f"shard_{self.index:05d}" if self.count > 1 else root


def shard_here(root: Path, wanted: int, environ: Mapping[str, str]) -> RowShard:
    """Return the part of this process: the part of its task in a job array, or all rows.

    `wanted`: generate.num_shards. The first task that starts writes the number of parts into `root`, so that tasks that
    are submitted again (--array=3,7) get the same parts. Raises ConfigError.
    """
    if ID not in environ:
        count = known_count(root) or wanted
        if count > 1:
            raise ConfigError(
                f"run_dir {root}: the rows are divided into {count} parts, and this is not a task of a job array: "
                f"submit it with --array=0-{count - 1}, or give another run_dir"
            )
        return RowShard()
    index, tasks = int(environ[ID]), int(environ.get(COUNT) or 1)
    known = known_count(root)
    count = known or wanted or tasks
    if known is None:
        last = int(environ.get(LAST) or index)
        if last >= count:
            raise ConfigError(
                f"--array has tasks up to {last}, and the rows are divided into {count} parts, numbered from 0: use "
                f"--array=0-{count - 1}, or set generate.num_shards to the number of parts"
            )
        count = _settle(root, count)
    if wanted and wanted != count:
        raise ConfigError(
            f"generate.num_shards = {wanted}, and the rows in {root} are divided into {count} parts ({SPLIT}): leave "
            "the key out, or give another run_dir"
        )
    if index >= count:
        raise ConfigError(
            f"{ID} = {index}, and the rows in {root} are divided into {count} parts, numbered from 0 ({SPLIT}): use "
            f"tasks of --array=0-{count - 1}"
        )
    return RowShard(index, count)


def known_count(root: Path) -> int | None:
    """Return the number of parts that a task has written into `root`; None: none has."""
    try:
        return int(json.loads((root / SPLIT).read_text(encoding="utf-8"))["count"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{root / SPLIT} cannot be read: remove it if no shard of {root} was started yet") from None


def _settle(root: Path, count: int) -> int:
    """Write the number of parts, unless another task was faster; return the number that counts."""
    root.mkdir(parents=True, exist_ok=True)
    temporary = root / f".{SPLIT}.{os.urandom(8).hex()}"
    temporary.write_text(json.dumps({"count": count}) + "\n", encoding="utf-8")
    try:
        os.link(temporary, root / SPLIT)  # whole or not at all, and never over another
    except FileExistsError:
        pass
    finally:
        temporary.unlink()
    return known_count(root) or count
