"""What a run tells of the one whose checkpoint it goes on from."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from slurm_rlhf.config.key_text import dump_toml
from slurm_rlhf.config.schema import Config
from slurm_rlhf.controller.earlier_run import changed_keys, refuse_other_model
from slurm_rlhf.errors import ConfigError


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
    file.write_text("no TOML at all")
    assert changed_keys(file, config) == []


def test_another_model_is_refused_and_the_same_one_elsewhere_is_not(tmp_path: Path) -> None:
    first, moved, other = (model(tmp_path / name, name[0].encode()) for name in ("a", "another", "b"))
    file, config = tmp_path / "config.toml", Config()
    config.actor.model_name_or_path = str(first)
    file.write_text(dump_toml(config))
    config.actor.model_name_or_path = str(moved)
    refuse_other_model(file, config)
    config.actor.model_name_or_path = str(other)
    with pytest.raises(ConfigError, match=r"started from .*/a, which holds another model: .* another --run_dir"):
        refuse_other_model(file, config)
    shutil.rmtree(first)  # nobody can tell any more
    refuse_other_model(file, config)
