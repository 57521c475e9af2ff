"""Differences from the run whose checkpoint a run goes on from: keys, the model, adapters."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slurm_rlhf.checkpoint.resume import changed_keys, refuse_other_model
from slurm_rlhf.config.contents import model_contents
from slurm_rlhf.config.keys import put
from slurm_rlhf.config.schema import Config
from slurm_rlhf.config.text import dump_toml
from slurm_rlhf.errors import ConfigError
from slurm_rlhf.run.conductor import Conductor
from slurm_rlhf.run.run_state import RunState
from slurm_rlhf.run_directory import RunDirectory


def model(path: Path, weights: bytes) -> Path:
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(weights)
    return path


def test_keys_that_were_changed_are_listed_with_both_values(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    config = Config(run_dir="/r/one")
    assert changed_keys(file, config) == []
    file.write_text(dump_toml(config) + "\n[of_a_later_version]\nkey = 1\n")
    assert changed_keys(file, config) == []
    config.run_dir, config.actor.learning_rate, config.algo.advantage.estimator = "/r/two", 0.5, "rloo"
    assert changed_keys(file, config) == [
        f"actor.learning_rate {Config().actor.learning_rate!r} -> 0.5",
        f'algo.advantage.estimator "{Config().algo.advantage.estimator}" -> "rloo"',
    ]
    file.write_text("[actor]\ngradient_checkpointing_enable = true\n")
    assert changed_keys(file, config) == ["actor.gradient_checkpointing_enable true -> not set"]
    file.write_text("no TOML at all")
    assert changed_keys(file, config) == []


def test_another_model_is_refused_and_the_same_one_elsewhere_is_not(tmp_path: Path) -> None:
    """A model is another one if its middle alone differs, if the first is gone, or if it was replaced in its place."""
    weights = bytes(100_000) + b"a" * 40_000 + bytes(100_000)
    first, moved, other = (
        {str(path): model_contents(path)}
        for path in (
            model(tmp_path / "a", weights),
            model(tmp_path / "moved", weights),
            model(tmp_path / "b", weights.replace(b"a", b"b")),
        )
    )
    refuse_other_model(first, moved)
    refuse_other_model({}, other)  # a checkpoint of an earlier version has no record of its model
    with pytest.raises(ConfigError, match=r"is .*/b, which holds another model than .*/a did .* another --run_dir"):
        refuse_other_model(first, other)
    (tmp_path / "a" / "config.json").write_text('{"rope_theta": 1}')
    with pytest.raises(ConfigError, match="holds another model"):
        refuse_other_model(first, {str(tmp_path / "a"): model_contents(tmp_path / "a")})


def test_resume_never_overwrites_no_run(tmp_path: Path) -> None:
    run: Any = SimpleNamespace(config=Config(resume="never"), directory=RunDirectory(tmp_path))
    assert Conductor._resume(run, None) == (RunState(seed=run.config.train.seed), None, True)  # type: ignore[arg-type]
    run.directory.metrics.touch()
    with pytest.raises(ConfigError, match=rf"{tmp_path} holds a run already and --resume never would overwrite it\."):
        Conductor._resume(run, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("key", "value", "stated"),
    [
        ("lora.alpha", 64.0, r"lora\.alpha 16\.0 -> 64\.0"),
        ("lora.rank", 8, r"lora\.rank 0 -> 8"),
        ("lora.target_modules", ["q_proj"], r"lora\.target_modules \[\"all-linear\"\] -> \[\"q_proj\"\]"),
    ],
)
def test_other_adapters_are_refused_before_anything_is_written(
    tmp_path: Path, key: str, value: object, stated: str
) -> None:
    config, checkpoint = Config(run_dir=str(tmp_path)), tmp_path / "checkpoints" / "step_000003"
    (tmp_path / "config.toml").write_text(dump_toml(config))
    put(config, key, value)
    inputs: Any = SimpleNamespace(total_steps=9)
    run: Any = SimpleNamespace(config=config, _resume=lambda inputs: (RunState(seed=0, step=3), checkpoint, False))
    with pytest.raises(ConfigError, match=rf"^{stated}: .* Restore {key}, .* another --run_dir for a new run"):
        Conductor._work(run, inputs)
