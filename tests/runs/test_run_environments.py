"""Whole runs with environments: what is learned in several turns, and what their failures cost."""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from env_server import EnvServer
from generation_runs import COMMAND, generation_workspace, lines_of
from tiny_models import make_reward
from training_runs import Run, metrics, started, timeless, train, workspace
from waiting import HANG_S, until

pytestmark = [pytest.mark.engine, pytest.mark.slow]

TURNS = (
    *("--reward.remote_url=", "--rollout.max_new_tokens=4"),
    *("--algo.advantage.estimator=group_norm", "--algo.kl.init_coef=0", "--train.max_epochs=1"),
    *("--rollout.batch_size=16", "--train.batch_size=64", "--train.max_steps=48", "--eval.dataset="),
)
LOOK = '''
class Environment:
    """Names a digit after the first turn, and rewards it in the second."""

    def reset(self, row):
        self.digit = "37"[sum(map(ord, row["input"])) % 2]

    def step(self, messages):
        if len(messages) == 2:
            return self.digit * 6, 0.0, False
        return None, messages[-1]["content"].count(self.digit) / 4, True
'''
GUESS = '''
class Environment:
    """Has one of the digits guessed: says whether it is higher or lower, and rewards the right one."""

    def reset(self, row):
        self.digit = "357"[sum(map(ord, row["input"])) % 3]

    def step(self, messages):
        guess = messages[-1]["content"][:1]
        if guess == self.digit:
            return None, 1.0, True
        return ("++" if guess.isdigit() and guess < self.digit else "--"), 0.0, False
'''


OTHER_SOURCE = """
[[reward.sources]]
name = "model"
weight = 0.0
model = true
"""
STATUS = [sys.executable, "-m", "slurm_rlhf.cli", "status"]


@dataclass(frozen=True)
class Learned:
    config: Path
    words: tuple[str, ...]
    run_dir: Path
    game: Path


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Learned:
    """A run with an environment, and beside it a reward model whose scores are logged and have no weight."""
    folder = tmp_path_factory.mktemp("learned")
    config, game = workspace(folder), folder / "game.py"
    config.write_text(config.read_text() + OTHER_SOURCE)
    game.write_text(LOOK)
    words = (*TURNS, f"--reward.model_name_or_path={make_reward(folder / 'scores')}", "--ckpt.save_steps=0")
    code, output = train(config, folder / "run", *words, f"--env.path={game}", warm=True)
    assert code == 0, output
    return Learned(config, words, folder / "run", game)


def test_two_turns_learn_what_one_cannot(learned: Learned) -> None:
    """The digit that counts is known after the first turn only: without a look at it, 0.5 is the most."""
    rows = metrics(learned.run_dir)
    rewards = [row["reward"] for row in rows]
    print([round(reward, 3) for reward in rewards])
    # Five seeds end between 0.99 and 1, two of them with the instructions of AVX2 alone; without learning, at 0.
    assert statistics.mean(rewards[-8:]) > 0.85
    assert all(row["turns"] == 2.0 for row in rows)
    assert all(row["lost"] == row["tools/calls"] == 0 for row in rows)
    assert all(row["rollout_logprob_diff_max"] < 1e-5 for row in rows)
    assert all(row["response_length"] <= 8 for row in rows)  # without the six tokens of the environment
    samples = [json.loads(line) for line in (learned.run_dir / "samples.jsonl").read_text().splitlines()]
    assert {sample["observed"][1] - sample["observed"][0] for sample in samples} == {6}
    assert [row["reward/environment"] for row in rows] == rewards
    assert len({row["reward/model"] for row in rows} - {0.0}) > 10


def test_resumed_and_paused_in_the_middle_it_writes_the_same_metrics(learned: Learned, tmp_path: Path) -> None:
    """Stopped after two steps; then it plays on a server, which dies, and comes back when `status` shows the pause."""
    words = (*learned.words, "--train.max_steps=6")
    with started(learned.config, tmp_path / "run", *words, f"--env.path={learned.game}", warm=True) as run:
        run.wait_for_step(2)
        run.process.terminate()
        assert run.wait()[0] == 143
    server = EnvServer(learned.game)
    try:
        with started(learned.config, tmp_path / "run", *words, f"--env.path={server.url}", warm=True) as run:
            run.wait_for_log("resuming from")
            server.kill()
            shown = until(lambda: re.search("^ *paused .*", _status(run), re.M), "the pause in `status`", 0.2)
            server.start()
            code, output = run.wait()
    finally:
        server.kill()
    assert code == 0, output
    assert f"the run waits for a server: {server.url}: ConnectError" in shown[0]
    assert timeless(metrics(tmp_path / "run")) == timeless(metrics(learned.run_dir)[:6])


def _status(run: Run) -> str:
    assert run.process.poll() is None, run.wait()
    command = [*STATUS, str(run.run_dir)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=HANG_S).stdout


@pytest.mark.full  # test_run_training has the command, and generate below the environments
def test_eval_plays_the_environment(learned: Learned, tmp_path: Path) -> None:
    config = tmp_path / "eval.toml"
    config.write_text(learned.config.read_text().replace(OTHER_SOURCE, ""))
    for name in ("eval.jsonl", "prompts.jsonl", "model"):
        (tmp_path / name).symlink_to(learned.config.parent / name)
    words = ("--reward.remote_url=", "--rollout.max_new_tokens=4", f"--env.path={learned.game}")
    words += (f"--model={learned.run_dir}", f"--output={tmp_path / 'out'}", "--eval.temperature=0")
    code, output = train(config, tmp_path / "out", *words, command=[*COMMAND[:-1], "eval"], warm=True)
    assert code == 0, output
    lines = [json.loads(line) for line in (tmp_path / "out" / "eval.jsonl").read_text().splitlines()]
    assert len(lines) == 24
    assert statistics.mean(line["score"] for line in lines) > 0.85
    digits = ["37"[sum(map(ord, line["prompt"])) % 2] * 6 for line in lines]
    assert all(digit in line["response"] for digit, line in zip(digits, lines, strict=True))


GUESSES = (
    *("--reward.remote_url=", "--rollout.max_new_tokens=1", "--env.max_turns=3", "--rollout.n_samples_per_prompt=8"),
    *("--algo.advantage.estimator=group_norm", "--algo.kl.init_coef=0", "--train.max_epochs=1"),
    *("--rollout.batch_size=16", "--train.batch_size=128", "--train.max_steps=60", "--eval.dataset="),
)


@pytest.mark.full  # two turns learn above
@pytest.mark.parametrize("seed", [7, 8, 9])
def test_a_guessing_game_is_won_more_often_than_one_guess_can(tmp_path: Path, seed: int) -> None:
    """One guess is right in a third of the games; of three, with answers in between, one always can be."""
    config = workspace(tmp_path)
    (tmp_path / "game.py").write_text(GUESS)
    path = f"--env.path={tmp_path / 'game.py'}"
    code, output = train(config, tmp_path / "run", *GUESSES, path, f"--train.seed={seed}", warm=True)
    assert code == 0, output
    rows = metrics(tmp_path / "run")
    rewards = [row["reward"] for row in rows]
    print([round(reward, 3) for reward in rewards], [round(row["turns"], 2) for row in rows][-8:])
    # A policy that finds two of the digits stays at two thirds for long: seeds 7, 8 and 9 end at 0.71, 0.99 and 1.
    assert statistics.mean(rewards[-8:]) > 0.5


def test_generate_plays_environments_and_names_lost_episodes(tmp_path: Path) -> None:
    config = generation_workspace(tmp_path, 160)
    fault = '        1 / (len(row["input"]) % 5)\n'
    (tmp_path / "game.py").write_text(GUESS.replace("        self.digit", f"{fault}        self.digit", 1))
    overrides = ("--reward.remote_url=", "--env.max_turns=2", "--generate.max_samples=12", "--env.workers=2")
    words = (*overrides, f"--env.path={tmp_path / 'game.py'}")
    with started(config, tmp_path / "run", *words, command=COMMAND, warm=True) as job:
        code, output = job.wait()
    assert code == 0, output
    lines = lines_of(tmp_path / "run" / "output.jsonl")
    lost = [line for line in lines if line["finish_reason"] == "lost"]
    assert lost
    assert {line["error"] for line in lost} == {"its environment failed: logs/reward.log"}
    for line in lines:
        if line["finish_reason"] is not None:  # else the row has no prompt
            assert (line in lost) == (len(line["prompt"]) % 5 == 0) == (line["score"] is None)
    assert "ZeroDivisionError" in (tmp_path / "run" / "logs" / "reward.log").read_text()
