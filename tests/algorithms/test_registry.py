"""Algorithms by name: the built-in ones, those of the user's files, and what can be wrong with either."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slurm_rlhf.algorithms import registry
from slurm_rlhf.algorithms.advantages import estimate
from slurm_rlhf.algorithms.policy_losses import gspo_loss, ppo_loss
from slurm_rlhf.algorithms.registry import (
    OF_PEERS,
    AdvantageInputs,
    Algorithm,
    built_in,
    changed_plugins,
    find_algorithm,
    load_plugins,
    policy_loss_of,
    register_algorithm,
)
from slurm_rlhf.errors import ConfigError

PLUGIN = """
import slurm_rlhf

def advantages(inputs):
    return inputs.rewards, None

slurm_rlhf.register_algorithm(slurm_rlhf.Algorithm({name!r}, advantages))
"""


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is registered before the test, and nothing is left of it."""
    monkeypatch.setattr(registry, "_REGISTERED", {})
    monkeypatch.setattr(registry, "_LOADED", {})


def plugin(folder: Path, text: str, name: str = "mine.py") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def nothing(inputs: AdvantageInputs) -> Any:
    return np.zeros(3), None


def test_unknown_names_are_answered_with_the_nearest_and_all_valid_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"estimator = 'gea' is unknown; did you mean gae\? \(valid: dr_grpo, gae,"):
        find_algorithm("gea")
    load_plugins([plugin(tmp_path, PLUGIN.format(name="group_mean"))])
    with pytest.raises(ConfigError, match=r"did you mean group_mean\? \(valid: .*group_mean"):
        find_algorithm("groupmean")
    with pytest.raises(ConfigError, match=r"'' is unknown \(valid: "):
        find_algorithm("")


def test_names_of_peers_are_said_in_ours() -> None:
    for theirs, ours in OF_PEERS.items():
        assert ours in built_in()
        with pytest.raises(ConfigError, match=f"is unknown: it is called {ours} here"):
            find_algorithm(theirs)


def test_a_plugin_is_run_once_and_its_content_is_reported(tmp_path: Path) -> None:
    file = plugin(tmp_path, PLUGIN.format(name="mine") + "print('once')")
    first = load_plugins([file])
    assert load_plugins([file]) == first
    assert re.fullmatch("[0-9a-f]{16}", first[file])
    assert find_algorithm("mine").needs_critic is False
    assert {policy_loss_of(name, "ppo") for name in ("mine", "gae", "passed as an object")} == {ppo_loss}
    assert policy_loss_of("mine", "gspo") is gspo_loss


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\nraise ValueError('no luck')", r"mine\.py:2: cannot be imported: ValueError: no luck\. Correct the"),
        ("x = (", r"mine\.py:1: cannot be imported: SyntaxError"),
        ("import no_such_module_at_all", r"mine\.py:1: cannot be imported: ModuleNotFoundError: No module named"),
        (PLUGIN.format(name="gae"), r"mine\.py:7: .*the algorithm name 'gae' is taken by .*ppo\.py: register yours by"),
        ("import slurm_rlhf\nslurm_rlhf.register_algorithm('x')", r"mine\.py:2: .*takes a slurm_rlhf\.Algorithm\("),
        (
            PLUGIN.format(name="x").replace(", advantages)", ", advantages, aggregation='mean')"),
            r"mine\.py:7: .*unknown aggregation 'mean'; valid: token-mean, seq-mean-token-mean",
        ),
    ],
)
def test_a_plugin_that_fails_is_named_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    file = plugin(tmp_path, text)
    with pytest.raises(ConfigError, match=message) as caught:
        load_plugins([file])
    assert "take it out of train.plugins" in str(caught.value)
    plugin(tmp_path, PLUGIN.format(name="mine"))  # mended in an editor while a notebook runs
    load_plugins([file])
    assert find_algorithm("mine")


def test_a_plugin_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train\.plugins: no such file: .*name a Python file that calls"):
        load_plugins([str(tmp_path / "none.py")])
    with pytest.raises(ConfigError, match=r"train\.plugins: is a directory, not a file"):
        load_plugins([str(tmp_path)])
    with pytest.raises(ConfigError, match=r"mine\.txt is not a Python file: its name must end in \.py"):
        load_plugins([plugin(tmp_path, "", "mine.txt")])


def test_two_files_cannot_register_one_name(tmp_path: Path) -> None:
    files = [plugin(tmp_path, PLUGIN.format(name="mine"), name) for name in ("a.py", "b.py")]
    with pytest.raises(ConfigError, match=r"b\.py:7: .*'mine' is taken by .*a\.py"):
        load_plugins(files)


def test_a_cell_that_runs_again_registers_again() -> None:
    register_algorithm(Algorithm("mine", nothing))
    again = register_algorithm(Algorithm("mine", nothing, whiten=True))
    assert find_algorithm("mine") is again
    with pytest.raises(ConfigError, match="is taken"):
        register_algorithm(Algorithm("mine", lambda _: (np.zeros(3), None)))
    register_algorithm(Algorithm("mine", lambda _: (np.zeros(3), None)), replace=True)


def test_changed_plugins_are_reported_by_name() -> None:
    before = {"/a/one.py": "1", "/a/two.py": "2"}
    assert changed_plugins(before, before) == changed_plugins({}, {}) == []
    assert changed_plugins(before, {"/b/one.py": "1", "/b/two.py": "2"}) == []  # moved
    now = {"/a/one.py": "7", "/a/three.py": "3"}
    assert changed_plugins(before, now) == ["one.py has changed", "two.py is gone", "three.py is new"]


def inputs() -> AdvantageInputs:
    mask = np.array([True, False, True])
    return AdvantageInputs(
        np.ones(2), None, None, mask, np.array([0, 2, 3]), np.array([0, 0]), 0.0, [-1.0, 1.0], 1.0, 1.0
    )


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((np.zeros(2), None), r"returned advantages of type float64 and shape \(2,\); numbers of shape \(3,\) are"),
        ((None, None), "returned advantages of type object"),
        ((np.array([1.0, np.nan, np.inf]), None), "returned 1 of 2 advantages that are not finite: guard its"),
        (np.zeros(3), r"raised ValueError: too many values.*it has to return two arrays"),
    ],
)
def test_what_an_advantage_function_may_not_answer(answer: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"test_registry\.py.*the advantage function of algorithm 'mine' {message}"):
        estimate(Algorithm("mine", lambda _: answer), inputs())


def test_what_it_raises_is_reported_with_its_line() -> None:
    def advantages(found: AdvantageInputs) -> Any:
        raise KeyError("values")

    with pytest.raises(ConfigError, match=r"test_registry\.py:\d+: the advantage function of .* raised KeyError"):
        estimate(Algorithm("mine", advantages), inputs())


def test_a_critic_needs_returns_and_others_get_none() -> None:
    zeros = np.zeros(3)
    assert set(estimate(Algorithm("mine", lambda _: (zeros, zeros)), inputs())) == {"advantages"}
    found = estimate(Algorithm("mine", lambda _: (zeros, zeros), needs_critic=True), inputs())
    assert {name: column.dtype for name, column in found.items()} == {"advantages": np.float32, "returns": np.float32}
    with pytest.raises(ConfigError, match="returned returns of type object"):
        estimate(Algorithm("mine", lambda _: (zeros, None), needs_critic=True), inputs())
