"""Errors of `slurm_rlhf.train` before any process starts. A whole run: tests/runs/test_run_self_check.py."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import slurm_rlhf
from slurm_rlhf import Algorithm, Config, Summary, load_config, train
from slurm_rlhf.algorithms import registry
from slurm_rlhf.errors import ConfigError, DataError
from slurm_rlhf.rewards import function


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """Nothing is registered, and a run that gets past the arguments ends with what it would train with."""
    monkeypatch.setattr(registry, "_REGISTERED", {})
    monkeypatch.setattr(function, "_REGISTERED", {})
    monkeypatch.setattr("slurm_rlhf.cli.train.train_here", started)
    config = Config(run_dir=str(tmp_path / "run"))
    config.reward.remote_url = "reward.py"
    return config


class Started(Exception):
    """Carries the configuration that a run would start with."""


def started(config: Config) -> int:
    raise Started(config)


def trained_with(config: Config, **arguments: Any) -> Config:
    with pytest.raises(Started) as caught:
        train(config, **arguments)
    found: Config = caught.value.args[0]
    return found


def ones(responses: list[str]) -> list[float]:
    return [1.0 for _ in responses]


def advantages(inputs: slurm_rlhf.AdvantageInputs) -> Any:
    return inputs.rewards, None


def test_the_callers_configuration_stays_as_it_is(config: Config, tmp_path: Path) -> None:
    before = load_config(None)
    before.run_dir, before.reward.remote_url = config.run_dir, "reward.py"
    used = trained_with(config, reward=ones, prompts=["a", {"input": "b", "label": 1}], algorithm=advantages)
    assert config == before
    assert used.reward.function == "ones"
    assert used.reward.remote_url == ""
    assert used.algo.advantage.estimator == "advantages"
    assert used.data.prompt_dataset == str(tmp_path / "run" / "prompts.jsonl")
    assert Path(used.data.prompt_dataset).read_text() == '{"input": "a"}\n{"input": "b", "label": 1}\n'
    trained_with(config, reward=ones, algorithm=Algorithm("advantages", advantages))  # a cell that runs again
    assert trained_with(config, algorithm="gae").algo.advantage.estimator == "gae"


def test_paths_start_at_the_working_directory(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config.run_dir, config.train.plugins = "here", ["mine.py"]
    used = trained_with(config)
    assert (used.run_dir, used.train.plugins) == (str(tmp_path / "here"), [str(tmp_path / "mine.py")])


def test_a_policy_loss_has_to_come_from_a_file(config: Config) -> None:
    record = Algorithm("mine", advantages, policy_loss=lambda inputs: (inputs.logprobs.sum(), {}))
    with pytest.raises(ConfigError, match=r"runs in the actor's processes.*name the file in config\.train\.plugins"):
        train(config, algorithm=record)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"reward": "reward.py"}, ConfigError, r"reward takes a function, got 'reward\.py': a file goes into"),
        ({"algorithm": 3}, ConfigError, "algorithm takes a name, a slurm_rlhf.Algorithm or an advantage function"),
        ({"prompts": "text"}, DataError, "prompts takes a list of texts or rows"),
        ({"prompts": []}, DataError, "prompts takes a list of texts or rows"),
        ({"prompts": ["a", 3]}, DataError, r"prompts\[1\] must be a text or a dict, got int"),
        ({"prompts": [{"input": object()}]}, DataError, r"prompts\[0\] cannot be written as JSON"),
    ],
)
def test_arguments_of_another_kind(
    config: Config, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        train(config, **arguments)


def test_values_of_another_type_are_all_reported(config: Config) -> None:
    config.train.max_steps = "2"  # type: ignore[assignment]
    config.actor.learning_rate = float("nan")
    with pytest.raises(ConfigError) as caught:
        train(config)
    assert "train.max_steps takes a whole number, got '2': write 2" in str(caught.value)
    assert "actor.learning_rate takes a number, got nan" in str(caught.value)
    with pytest.raises(ConfigError, match="run_dir is not set: name where"):
        train(Config())


def test_under_mpi_every_process_would_start_a_run(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    with pytest.raises(ConfigError, match=r"one of several that mpirun .* use `slurm-rlhf train FILE\.toml` there"):
        train(config)


def test_another_thread_is_refused(config: Config) -> None:
    with ThreadPoolExecutor() as pool, pytest.raises(ConfigError, match="call it in the main thread"):
        pool.submit(train, config).result()


def test_a_reward_that_nobody_has_registered(config: Config) -> None:
    function.register_reward(ones)
    config.reward.function = "one"
    with pytest.raises(ConfigError, match=r"reward\.function = 'one' is not registered; did you mean ones\?"):
        function.RewardFunction.of(config.reward)
    with pytest.raises(ConfigError, match=r"the reward name 'ones' is taken by .*test_train\.py"):
        function.register_reward(lambda responses: [], "ones")


def test_a_summary_is_read_as_it_was_written(tmp_path: Path) -> None:
    summary = Summary("finished", 2, 2, None, 0.5, 0.1, 0.2, 3.0, 4.0, 2, {"actor": 1}, 42, {"ratio": 1.0})
    summary.write(tmp_path / "summary.json")
    assert Summary.read(tmp_path / "summary.json") == summary


def test_ctrl_c_reaches_the_caller_after_the_run_has_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slurm_rlhf.cli.train.train_here", lambda config: 130)
    with pytest.raises(KeyboardInterrupt):
        slurm_rlhf.train(Config(run_dir=str(tmp_path)))
