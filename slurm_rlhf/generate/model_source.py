"""Find the weights of a job: a Hugging Face directory, one in the cache, or the output of a training run."""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from slurm_rlhf.checkpoint import resume
from slurm_rlhf.checkpoint.resume import MANIFEST
from slurm_rlhf.config import user_data
from slurm_rlhf.config.check import GENERATED_BY
from slurm_rlhf.config.load import load_config
from slurm_rlhf.config.model_directory import check_length, check_model_directory, check_tensor_parallel
from slurm_rlhf.config.roles import ACTOR
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import CheckpointError, ModelError, RunError
from slurm_rlhf.observe.log_tail import quoted
from slurm_rlhf.run_directory import RunDirectory

EXPORT = "slurm_rlhf.trainer.export"
"""Module that makes a Hugging Face directory from a checkpoint; it needs torch, so it is a process of its own."""
MADE = "model"
"""Directory, in the run directory of the job, of a model that was made from a checkpoint."""
DONE = "exported.ok"
"""File in it which says that the model is whole."""


@dataclass(frozen=True, slots=True)
class Source:
    """Says where the weights are: in `model`, or in a checkpoint from which `model` is made first."""

    model: Path
    checkpoint: Path | None = None
    base: Path | None = None  # first model of the run: configuration and tokenizer
    dtype: str = ""  # precision of the run


def find_source(config: Config, root: Path) -> Source:
    """Find the weights that generate.model_name_or_path names; a checkpoint's model is made in `root`.

    Raises ModelError, CheckpointError.
    """
    path, made = Path(config.generate.model_name_or_path), root / MADE
    if (path / "config.json").is_file():
        return Source(path)
    if (made / DONE).is_file():  # made by an earlier start; the rows have to keep this model
        return Source(made)
    if (path / MANIFEST).is_file():
        return _of_checkpoint(path, root)
    run = RunDirectory(path)
    if (run.final / "config.json").is_file():
        return Source(run.final)
    if run.config.is_file():
        newest = resume.latest(run.checkpoints)
        if newest is None:
            raise ModelError(f"{GENERATED_BY}: the run in {path} has neither a final model nor a whole checkpoint yet")
        return _of_checkpoint(newest, root)
    # OWNER/NAME, or NAME, in the Hugging Face cache; the path was made absolute when it was read.
    if not path.exists() and (
        cached := user_data.cached(f"{path.parent.name}--{path.name}") or user_data.cached(path.name)
    ):
        return Source(cached)
    raise ModelError(
        f"{GENERATED_BY}: {path} is no Hugging Face directory (config.json), no run directory (config.toml, final/) "
        f"and no checkpoint ({MANIFEST}), and no model of that name is in the Hugging Face cache here: download it "
        "first, where there is a network: `hf download <name>`"
    )


def _of_checkpoint(checkpoint: Path, root: Path) -> Source:
    resume.load_state(checkpoint, [ACTOR])
    settings = RunDirectory(checkpoint.absolute().parents[1]).config
    if not settings.is_file():
        raise CheckpointError(
            f"{checkpoint}: {settings} is missing, which says from what model the run started, and a checkpoint has no "
            "tokenizer: leave checkpoints in their run directory"
        )
    trained = load_config(settings, [])
    base = Path(trained.actor.model_name_or_path)
    if not (base / "config.json").is_file():
        raise ModelError(
            f"{checkpoint}: the run started from {base}, which is gone; its configuration and tokenizer are needed. "
            "Put it back, or use the final model of the run"
        )
    return Source(root / MADE, checkpoint, base, trained.ds.param_dtype)


def provide(source: Source, note: Callable[[str], None], log: Path) -> Path:
    """Return the directory of the model, which is made first if the source is a checkpoint and none has made it.

    Other tasks of a job array wait meanwhile. Blocks while the weights are read and written. Raises RunError
    with the last lines of `log`.
    """
    if source.checkpoint is None:
        return source.model
    with open(source.model.with_name(f".{MADE}.lock"), "a", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (source.model / DONE).is_file():
            note(f"making a model from {source.checkpoint}")
            _export(source, log)
    return source.model


def _export(source: Source, log: Path) -> None:
    assert source.checkpoint is not None
    shutil.rmtree(source.model, ignore_errors=True)
    begin = log.stat().st_size if log.exists() else 0
    with open(log, "ab") as out:
        words = [source.checkpoint / ACTOR, source.base, source.model, source.dtype]
        command = [sys.executable, "-m", EXPORT, *map(str, words)]
        done = subprocess.run(command, stdout=out, stderr=out, stdin=subprocess.DEVNULL, check=False)
    if done.returncode:
        raise RunError(f"{source.checkpoint} could not be made into a model. {quoted(log, 8, begin)}")
    (source.model / DONE).write_text(str(source.checkpoint), encoding="utf-8")


def check_model(config: Config, model: Path) -> None:
    """Check what the engines need of the model. Raises ModelError, ConfigError."""
    check_model_directory(GENERATED_BY, str(model), tokenizer=True)
    check_length(GENERATED_BY, str(model), config.data.max_len)
    check_tensor_parallel(GENERATED_BY, str(model), config.vllm.tensor_parallel_size)
