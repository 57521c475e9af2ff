"""Put the outputs of all shards into one file, in the order of the rows."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from slurm_rlhf.errors import ConfigError, DataError, shortened
from slurm_rlhf.generate.identity import FILE, ROWS, SHARD, RowShard, known_count, read_identity
from slurm_rlhf.generate.output import MERGED, OUTPUT, whole_lines
from slurm_rlhf.run_directory import write_atomically

SAMPLES = "rollout.n_samples_per_prompt"


def merge(root: Path, out: Path | None, partial: bool = False) -> tuple[Path, int, int]:
    """Write the lines of all shards of a job by (row, sample) to `out`; None: to merged.jsonl in `root`.

    Returns where they are, and the numbers of lines and shards. Nothing is overwritten. Raises ConfigError for a job
    whose shards do not belong together or that is not complete, unless `partial` is set; DataError for a row that is
    there twice.
    """
    out = out or root / MERGED
    if out.exists():
        raise ConfigError(f"{out} is there already, and is not overwritten: remove it, or name another file (--output)")
    count = known_count(root) or 1
    directories = [RowShard(index, count).directory(root) for index in range(count)]
    begun = [directory for directory in directories if (directory / FILE).exists()]
    if not begun:
        raise ConfigError(f"{root} holds no output of `slurm-rlhf generate` ({FILE}): give its run_dir")
    rows, samples = _sizes(begun)
    files = [directory / OUTPUT for directory in begun if (directory / OUTPUT).exists()]
    places = _places(files)
    missing = rows * samples - len(places)
    if missing and not partial:
        absent = [str(row) for row in range(rows) if any((row, sample) not in places for sample in range(samples))]
        raise ConfigError(
            f"{missing} of {rows * samples} responses are not there yet, of the rows {shortened(absent, 8)}: run the "
            "job (or the tasks of its array that have failed) again, or merge what there is with --partial"
        )
    _write(out, files, [places[key] for key in sorted(places)])
    return out, len(places), len(begun)


def _sizes(directories: Sequence[Path]) -> tuple[int, int]:
    """Return the number of rows and of samples of each; all settings of the shards must be equal."""
    first = read_identity(directories[0])
    for directory in directories[1:]:
        other = read_identity(directory)
        unlike = [key for key in first if key != SHARD and first[key] != other.get(key)]
        if unlike:
            key = unlike[0]
            raise ConfigError(
                f"{directories[0]} and {directory} do not belong together: {key} is {first[key]!r} and "
                f"{other.get(key)!r}. Run the shards with the same settings"
            )
    return int(first[ROWS]), int(first[SAMPLES])


def _places(files: Sequence[Path]) -> dict[tuple[int, int], tuple[int, int, int]]:
    """Find where each line is: (row, sample) -> (file, where it begins, how long it is)."""
    places: dict[tuple[int, int], tuple[int, int, int]] = {}
    for number, path in enumerate(files):
        for begin, end, line in whole_lines(path):
            key = (int(line["row"]), int(line["sample"]))
            if key in places:
                raise DataError(
                    f"{path}: row {key[0]}, sample {key[1]} is there twice, first in {files[places[key][0]]}"
                )
            places[key] = (number, begin, end - begin)
    return places


def _write(out: Path, files: Sequence[Path], places: Sequence[tuple[int, int, int]]) -> None:
    """Copy the lines; the file takes its name when it is complete. Raises OSError, ConfigError if the name is taken."""
    with ExitStack() as stack:
        sources = [stack.enter_context(open(path, "rb")) for path in files]
        lines = (os.pread(sources[number].fileno(), size, begin) for number, begin, size in places)
        text = (line.decode("utf-8", "surrogateescape") for line in lines)
        try:
            write_atomically(out, text, durable=True, errors="surrogateescape", once=True)
        except FileExistsError:
            raise ConfigError(f"{out} is there already, and is not overwritten") from None
