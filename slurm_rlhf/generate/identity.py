"""Says what an output was made with, which no job with other settings continues, and which rows a task has.

`merge` puts the outputs of all tasks into one file, in the order of the rows.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurm_rlhf.config.contents import model_contents
from slurm_rlhf.config.keys import get
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import ConfigError, DataError, shortened
from slurm_rlhf.generate.output import MERGED, OUTPUT, whole_lines
from slurm_rlhf.run_directory import write_atomically

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


def shard_here(root: Path, environ: Mapping[str, str]) -> RowShard:
    """Return the part of this process: the part of its task in a job array, or all rows.

    The first task that starts writes the number of parts, which is that of the tasks, into `root`, so that tasks that
    are submitted again (--array=3,7) get the same parts. Raises ConfigError.
    """
    if ID not in environ:
        if (known := known_count(root) or 1) > 1:
            raise ConfigError(
                f"run_dir {root}: the rows are divided into {known} parts, and this is not a task of a job array: "
                f"submit it with --array=0-{known - 1}, or give another run_dir"
            )
        return RowShard()
    index, tasks = int(environ[ID]), int(environ.get(COUNT) or 1)
    count = known_count(root)
    if count is None:
        last = int(environ.get(LAST) or index)
        if last >= tasks:
            raise ConfigError(
                f"--array has tasks up to {last}, and there are {tasks}, numbered from 0: use --array=0-{tasks - 1}"
            )
        root.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):  # another task was faster
            write_atomically(root / SPLIT, json.dumps({"count": tasks}) + "\n", once=True)
        count = known_count(root) or tasks
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


FILE = "generation.json"
"""Name of the description, in the directory of the output."""
COMMON = (
    "data.input_template",
    "data.apply_chat_template",
    "data.max_len",
    "rollout.max_new_tokens",
    "rollout.stop",
    "train.seed",
)
"""Keys that change every response."""
OF_ROWS = (
    "generate.model_name_or_path",
    "generate.dataset",
    "generate.max_samples",
    "generate.logprobs",
    "data.input_key",
    "data.weights",
    "data.map",
    "data.filter",
    "rollout.n_samples_per_prompt",
    "rollout.temperature",
    "rollout.top_p",
    "rollout.top_k",
    "rollout.repetition_detection_max_pattern_size",
    "rollout.repetition_detection_min_pattern_size",
    "rollout.repetition_detection_min_count",
)
"""Further keys that change the responses of `slurm-rlhf generate`."""
ROWS, SHARD = "rows", "shard"

Identity = dict[str, Any]
"""Key of the configuration, or what a file holds -> its value."""


def identity_of(config: Config, model: Path, keys: Sequence[str] = ()) -> Identity:
    """Describe the output that `config` asks for, with the weights in the directory `model`, by `keys` and others."""
    tools = config.data.tools_key
    return {
        "model_fingerprint": model_contents(model),
        **{key: get(config, key) for key in (*keys, *COMMON)},
        **({"data.tools_key": tools} if tools else {}),
        "vllm.dtype": config.vllm.dtype if config.vllm.dtype != "auto" else config.ds.param_dtype,
        "reward": config.reward.remote_url or config.reward.function,
    }


def claim(directory: Path, identity: Identity, option: str = "run_dir") -> None:
    """Make `directory` the place of this output, begun before or not. `option` names the directory.

    Raises ConfigError where it holds an output of something else, with both values, or one of unknown origin.
    """
    file = directory / FILE
    if not file.exists():
        if (directory / OUTPUT).exists():
            raise ConfigError(
                f"{directory / OUTPUT} is there, and no {FILE} says what it was made with: it is not overwritten. Give "
                f"another {option}, or move the file away"
            )
        write_atomically(file, json.dumps(identity, indent=1) + "\n", durable=True)
        return
    before = read_identity(directory)
    unlike = [
        f"{key}: {_shown(before.get(key))} there, {_shown(identity.get(key))} here"
        for key in [*identity, *(key for key in before if key not in identity)]
        if before.get(key) != identity.get(key)
    ]
    if unlike:
        differences = "\n  ".join(unlike)
        raise ConfigError(
            f"{directory / OUTPUT} was made with other settings, and rows of two kinds do not belong in one file:\n"
            f"  {differences}\nGive this job another {option}, or the settings that the file was begun with"
        )


def read_identity(directory: Path) -> Identity:
    """Read what an output was made with. Raises ConfigError."""
    try:
        found: Identity = json.loads((directory / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{directory / FILE} cannot be read: {error}") from None
    return found


def _shown(value: Any) -> str:
    return json.dumps(value) if value is not None else "not set"


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
