"""Run `slurm-rlhf prefetch FILE.toml`: download what a configuration names of the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from slurm_rlhf.cli.commands import Arguments
from slurm_rlhf.config.data_files import FORMATS, data_files, parts
from slurm_rlhf.config.evaluation import data_sets
from slurm_rlhf.config.hub import WANTED_FILES, download, remote_name
from slurm_rlhf.config.keys import all_keys, get
from slurm_rlhf.config.load import load_config
from slurm_rlhf.config.schema import Config
from slurm_rlhf.config.text import toml_value
from slurm_rlhf.errors import DataError

MODEL, DATA, KERNEL = "model", "data set", "kernel"
FILES = {MODEL: WANTED_FILES, DATA: [f"*{suffix}" for suffix in FORMATS], KERNEL: ["*"]}
"""Kind of repository -> patterns of its files that are downloaded."""


def prefetch(arguments: Arguments) -> int:
    """Download, and say what to write into the file. Raises ModelError where the hub does not answer."""
    config = load_config(arguments.files, arguments.overrides)
    found = list(dict.fromkeys(_named(config)))
    if not found:
        print("everything that the file names is on this machine, or is no name of the hub: nothing to download")
    for key, name, kind in found:
        print(f"{key}: downloading the {kind} {name}", flush=True)
        place = Path(download(name, key, "dataset" if kind == DATA else "model", FILES[kind]))
        print(f"{key}: {name} is in {place}")
        for line in _to_write(key, place) if kind == DATA else ["the name stays as it is: it is found in the cache"]:
            print(f"  {line}")
    return 0


def _named(config: Config) -> Iterator[tuple[str, str, str]]:
    """Find (key, OWNER/NAME, what it is) of all that is not here."""
    for key in all_keys().values():
        value = get(config, key.name)
        if key.name.endswith("model_name_or_path") and (name := _absent(value)):
            yield key.name, name, MODEL
        if key.kind == "path" and key.name.endswith("dataset"):
            yield from ((key.name, name, DATA) for part in parts(value) if (name := _absent(part)))
    yield from (("eval.datasets", name, DATA) for one in data_sets(config) if (name := _absent(one.path)))
    if "/" in config.ds.attn_implementation:
        yield "ds.attn_implementation", config.ds.attn_implementation, KERNEL


def _absent(value: str) -> str:
    return "" if not value or Path(value).exists() else remote_name(value)


def _to_write(key: str, place: Path) -> Iterator[str]:
    """Write the line that names a downloaded data set in the file: its directory, or the files of each split."""
    try:
        data_files(place)
        names = [str(place)]
    except DataError:
        files = [file for suffix in FORMATS for file in place.rglob(f"*{suffix}")]
        names = sorted({str(file.parent / f"{file.stem.partition('-')[0]}*{file.suffix}") for file in files})
    group, _, leaf = key.rpartition(".")
    yield f"write into the file, in [{group}]{': one of' if len(names) > 1 else ''}"
    yield from (f"{leaf} = {toml_value(name)}" for name in names)
    if not names:
        yield f"nothing: it holds no file of rows ({', '.join(FORMATS)})"
