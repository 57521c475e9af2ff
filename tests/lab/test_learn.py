"""`tests/lab/learn.py` without its runs: curves, table, picture, and what a user has to mend."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import asdict, replace
from pathlib import Path
from xml.etree import ElementTree

import learn
import pytest
import task
from learn import points_of, prepare, processes, show, side_of
from learn_curves import Learned, Point, Side, levels, picture, race

from slurm_rlhf.config.load import load_config
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import ConfigError, RunError
from slurm_rlhf.placement.rank_map import NodeShare, RankMap
from slurm_rlhf.placement.topology import Node, Topology

SBATCH = Path(__file__).parents[2] / "sbatch"


def learned(seed: int, seconds_per_step: float, accuracies: list[float]) -> Learned:
    points = [Point(100 * step, step * seconds_per_step, value) for step, value in enumerate(accuracies)]
    return Learned(seed, points, start_up_s=10.0 * seed)


OURS = Side("ours", [learned(1, 2.0, [0.5, 0.7, 0.8, 0.9, 0.9]), learned(2, 4.0, [0.5, 0.9, 0.8, 0.9, 1.0])])
PEER = Side("TRL 1.16.0", [learned(1, 6.0, [0.5, 0.6, 0.7, 0.8, 0.8])])


def test_a_side_is_the_mean_of_its_seeds() -> None:
    assert OURS.mean()[1] == Point(100, 3.0, pytest.approx(0.8))
    assert OURS.accuracy_at(50) == pytest.approx(0.65)
    assert OURS.accuracy_at(999) == pytest.approx(0.95)
    assert OURS.start_up_s == 15
    uneven = Side("ours", [OURS.runs[0], Learned(3, [Point(7, 1.0, 0.5)] * 5, 1.0)])
    with pytest.raises(ValueError, match="not evaluated after the same samples"):
        uneven.mean()


def test_seconds_to_an_accuracy_are_those_of_its_first_crossing() -> None:
    """Straight lines between evaluations; a curve that begins there has needed nothing."""
    assert OURS.seconds_to(0.65) == pytest.approx(1.5)
    assert OURS.seconds_to(0.95) == pytest.approx(12)
    assert OURS.seconds_to(0.5) == 0
    assert OURS.seconds_to(0.96) is None
    assert PEER.seconds_to(0.8) == pytest.approx(18)
    assert levels(PEER) == [0.6, 0.7, 0.8]
    odd = Side("odd", [learned(1, 1.0, [0.5, 0.6, 0.7, 0.8, 0.8527])])
    assert levels(odd)[-1] == 0.852
    assert odd.seconds_to(0.852) is not None


def test_the_table_has_both_races() -> None:
    lines = race(OURS, PEER).splitlines()
    assert lines[1].split() == ["100", "samples", "0.800", "0.600"]
    reached = next(line for line in lines if line.split()[0] == "0.800")
    # 3 s against 18, and with a start-up of 15 and 10: 18 against 28
    assert reached.split() == ["0.800", "3.0", "18.0", "0.17", "18.0", "and", "28.0,", "0.64"]
    assert "never" in race(PEER, OURS)
    assert "TRL" not in race(OURS, None)


def test_the_table_says_what_each_side_computed_with() -> None:
    ranks = RankMap(Topology((Node("here", 0, 2),)), {"actor": [NodeShare("here", (0, 1), (0, 1))]})
    used = processes(Config(), ranks, cpus=64)
    assert used == "actor 2 x 1"
    runs = [replace(OURS.runs[0], processes=used)]
    assert "processes x threads: ours actor 2 x 1" in race(Side("ours", runs), PEER).splitlines()


def test_the_picture_has_a_line_for_each_run_and_each_mean() -> None:
    root = ElementTree.fromstring(picture([OURS, PEER], "a < b"))
    lines = [element for element in root.iter() if element.tag.endswith("polyline")]
    assert len(lines) == 2 * (2 + 1 + 1)
    assert {len(line.attrib["points"].split()) for line in lines} == {5}
    assert {"a < b", "ours", "TRL 1.16.0"} <= {element.text for element in root.iter() if element.tag.endswith("text")}


def test_the_curve_of_a_run_leaves_out_its_evaluations() -> None:
    rows = [{"step": 1, "time/step": 2.0}, {"step": 2, "time/step": 5.0, "time/eval": 2.5, "eval": 0.75}]
    assert points_of(rows, 0.5, 256) == [Point(0, 0.0, 0.5), Point(512, 4.5, 0.75)]


def test_the_json_object_is_what_the_table_is_made_of() -> None:
    result = {"sides": [asdict(OURS), asdict(PEER)], "picture": "/x/learn.svg"}
    assert side_of(result["sides"][0]) == OURS
    assert show(result).endswith("picture: /x/learn.svg")


def test_both_sides_take_one_optimizer_step_per_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("learn.check", lambda config: None)
    config = load_config([SBATCH / "recipes" / "grpo.toml", SBATCH / "quickstart.toml"])
    config.rollout.n_samples_per_prompt = 8
    prepare(config, 120, 10)
    assert config.rollout.batch_size * 8 == config.train.batch_size == 256
    assert (config.train.max_steps, config.eval.steps) == (120, 10)
    config.rollout.n_samples_per_prompt = 7
    with pytest.raises(ConfigError, match=r"rollout\.n_samples_per_prompt = 7 must .* divide train\.batch_size = 256"):
        prepare(config, 120, 10)
    config.eval.dataset = ""
    with pytest.raises(ConfigError, match=r"needs eval\.dataset and reward\.remote_url"):
        prepare(config, 120, 10)


def test_without_the_peer_it_says_how_to_get_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [str(SBATCH / "quickstart.toml"), f"--out={tmp_path / 'out'}"]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert learn.main(words) == 2
    assert "pip install '.[peer]', or --no-peer" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_run_that_says_nothing_any_more_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task, "LIMIT_S", 0.5)
    with pytest.raises(RunError, match=r"did not end within 0\.5 s; see .*log"):
        task.run_process([sys.executable, "-c", "import time; time.sleep(60)"], tmp_path / "log")


def test_a_run_that_fails_is_shown_by_its_last_lines(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"ended with 3; all of its output: .*log\nthe reason$"):
        task.run_process([sys.executable, "-c", "print('the reason'); raise SystemExit(3)"], tmp_path / "log")
