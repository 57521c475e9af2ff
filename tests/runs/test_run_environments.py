"""Whole runs with environments: what is learned in several turns, and what their failures cost."""

from __future__ import annotations

import hashlib
import json
import random
import re
import statistics
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
from checkout import ROOT
from env_server import EnvServer
from generation_runs import COMMAND, generation_workspace, lines_of
from sums_task import toml
from tiny_models import make_reward
from training_runs import COMMAND as TRAIN
from training_runs import Run, finished, metrics, started, timeless, workspace
from waiting import HANG_S, until

pytestmark = [pytest.mark.engine, pytest.mark.slow]

TURNS = (
    *("--reward.remote_url=", "--rollout.max_new_tokens=4"),
    *("--algo.advantage.estimator=group_norm", "--algo.kl.init_coef=0", "--train.max_epochs=1"),
    *("--rollout.batch_size=16", "--train.batch_size=64", "--train.max_steps=8", "--eval.dataset="),
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
OTHER_SOURCE = """
[[reward.sources]]
name = "model"
weight = 0.0
model = true
"""
SBATCH = Path(__file__).parents[2] / "sbatch"
STATUS = [sys.executable, "-m", "slurm_rlhf.cli", "status"]


SHEET = """
class Environment:
    '''Has the problem on a sheet of paper, which the policy sees by the tool alone.'''

    def reset(self, problem: str, **columns) -> None:
        self.problem = problem

    def read(self) -> str:
        '''Reads the problem.'''
        return self.problem
"""
SHEETS: dict[str, object] = {
    "data.prompt_dataset": "rows.jsonl",
    "data.apply_chat_template": True,
    "data.max_len": 24,
    "actor.model_name_or_path": "model",
    "actor.learning_rate": 2e-4,
    "env.path": "sheet.py",
    "env.max_turns": 2,
    "env.workers": 1,
    "reward.remote_url": "",
    "reward.preset": "exact",
    "reward.workers": 1,
    "rollout.batch_size": 32,
    "rollout.n_samples_per_prompt": 8,
    "rollout.max_new_tokens": 1,
    "train.batch_size": 256,
    "train.max_steps": 28,
    "eval.dataset": "",
    "logger.tensorboard": False,
}
"""Keys that are the user's, and sizes; all else is sbatch/recipes/tools_grpo.toml and sbatch/quickstart.toml."""


# --- the model of sbatch/quickstart.sh, and a copy of it whose policy may call a tool ---------------------------------


SOURCES = (ROOT / "sbatch" / "quickstart_data.py", ROOT / "sbatch" / "quickstart_sft.toml")
TOOL = "read"
CALL = f'<tool_call>{{"name": "{TOOL}", "arguments": {{}}}}</tool_call>'
TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}{% for m in messages %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
)
"""A chat template. Words that its vocabulary has no token for, such as a tool's name, leave none in a prompt."""


def quickstart_model(directory: Path) -> Path:
    """The fine-tuned model: that of runs/quickstart_input, or one made in `directory`, which takes a minute."""
    held, made = ROOT / "runs" / "quickstart_input", b"".join(source.read_bytes() for source in SOURCES)
    recipe = held / "recipe"
    if recipe.is_file() and recipe.read_text().strip() == hashlib.sha256(made).hexdigest():
        return held / "model"
    words = (f"--actor.model_name_or_path={directory / 'untrained'}", f"--sft.dataset={directory / 'sft.jsonl'}")
    sft = ("-m", "slurm_rlhf.cli", "sft", SOURCES[1], *words, f"--sft.output_dir={directory / 'model'}")
    for command in ((SOURCES[0], directory), sft):
        subprocess.run([sys.executable, *map(str, command)], check=True, capture_output=True, timeout=HANG_S)
    return directory / "model"


def with_tool(model: Path, directory: Path, like: str) -> None:
    """Write a copy that calls the tool by one token more, which it samples where it would `like`, but less often."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, policy = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model)
    tokenizer.add_tokens([CALL])
    tokenizer.chat_template = TEMPLATE
    policy.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    rows = policy.get_input_embeddings().weight.data
    rows[-1] = 0.9 * rows[tokenizer.convert_tokens_to_ids(like)]
    policy.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


# --- the tests --------------------------------------------------------------------------------------------------------


def sheets(folder: Path) -> Path:
    """The quickstart's model, which may call `read`; additions, and the hundreds of their sums, each as often."""
    with_tool(quickstart_model(folder), folder / "model", like="1")
    draw, rows = random.Random(1), list[dict[str, str]]()
    while len(rows) < 4000:
        one, other = draw.randrange(100, 900), draw.randrange(100, 900)
        if (hundreds := (one + other) // 100) == 2 + len(rows) % 8:
            rows.append({"input": "5", "problem": f"{one}+{other}=", "label": str(hundreds)})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "sheet.py").write_text(SHEET)
    (folder / "run.toml").write_text(toml(SHEETS))
    return folder / "run.toml"


@pytest.mark.parametrize("seed", [7, *(pytest.param(seed, marks=pytest.mark.full) for seed in (8, 9))])
def test_the_quickstarts_model_learns_to_call_a_tool_and_to_use_what_it_says(tmp_path: Path, seed: int) -> None:
    """One turn cannot know more than the prompt, which is the same in all rows: at best it says the commonest label."""
    config, files = sheets(tmp_path), [str(SBATCH / name) for name in ("recipes/tools_grpo.toml", "quickstart.toml")]
    finished(config, tmp_path / "run", f"--train.seed={seed}", command=[*TRAIN, *files])
    labels = Counter(json.loads(line)["label"] for line in (tmp_path / "rows.jsonl").read_text().splitlines())
    one_turn = max(labels.values()) / labels.total()
    rows = metrics(tmp_path / "run")
    accuracy = [row["accuracy"] for row in rows]
    assert one_turn == 1 / 8
    # At first it calls in a third of the episodes, and adds badly then. Seeds 7, 8 and 9 end at 0.46, 0.44 and 0.48.
    assert accuracy[0] < 1.5 * one_turn
    assert statistics.mean(accuracy[-8:]) > 2.5 * one_turn
    assert all(row["tools/raised"] == row["tools/unreadable"] == row["lost"] == 0 for row in rows)
    assert f"{rows[-1]['tools/calls']:.3g} calls of tools" in _status(tmp_path / "run")
    data = (tmp_path / "run" / "report.html").read_text().partition('id="data">')[2].partition("</script>")[0]
    assert min(json.loads(data)["runs"][0]["curves"]["values"]["tools/calls"]) > 0


@dataclass(frozen=True)
class Played:
    config: Path
    words: tuple[str, ...]
    run_dir: Path
    game: Path


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Played:
    """A run with an environment, and a reward model whose scores are logged and have no weight."""
    folder = tmp_path_factory.mktemp("played")
    config, game = workspace(folder), folder / "game.py"
    config.write_text(config.read_text() + OTHER_SOURCE)
    game.write_text(LOOK)
    words = (*TURNS, f"--reward.model_name_or_path={make_reward(folder / 'scores')}", "--ckpt.save_steps=0")
    finished(config, folder / "run", *words, f"--env.path={game}")
    return Played(config, words, folder / "run", game)


def test_each_turn_is_trained_on_and_counted(played: Played) -> None:
    rows = metrics(played.run_dir)
    rewards = [row["reward"] for row in rows]
    assert all(row["turns"] == 2.0 for row in rows)
    assert all(row["lost"] == row["tools/calls"] == 0 for row in rows)
    assert all(row["rollout_logprob_diff_max"] < 1e-5 for row in rows)
    assert all(row["response_length"] <= 8 for row in rows)  # without the six tokens of the environment
    samples = [json.loads(line) for line in (played.run_dir / "samples.jsonl").read_text().splitlines()]
    assert {sample["observed"][1] - sample["observed"][0] for sample in samples} == {6}
    assert [row["reward/environment"] for row in rows] == rewards
    assert len({row["reward/model"] for row in rows} - {0.0}) == 8


def test_resumed_and_paused_in_the_middle_it_writes_the_same_metrics(played: Played, tmp_path: Path) -> None:
    """Stopped after two steps; then it plays on a server, which dies, and comes back when `status` shows the pause."""
    words = (*played.words, "--train.max_steps=6")
    with started(played.config, tmp_path / "run", *words, f"--env.path={played.game}", warm=True) as run:
        run.wait_for_step(2)
        run.process.terminate()
        assert run.wait()[0] == 143
    server = EnvServer(played.game)
    try:
        with started(played.config, tmp_path / "run", *words, f"--env.path={server.url}", warm=True) as run:
            run.wait_for_log("resuming from")
            server.kill()
            shown = until(lambda: re.search("^ *paused .*", _going_on(run), re.M), "the pause in `status`", 0.2)
            server.start()
            code, output = run.wait()
    finally:
        server.kill()
    assert code == 0, output
    assert f"the run waits for a server: {server.url}: ConnectError" in shown[0]
    assert timeless(metrics(tmp_path / "run")) == timeless(metrics(played.run_dir)[:6])


def _going_on(run: Run) -> str:
    assert run.process.poll() is None, run.wait()
    return _status(run.run_dir)


def _status(run_dir: Path) -> str:
    return subprocess.run([*STATUS, str(run_dir)], capture_output=True, text=True, check=False, timeout=HANG_S).stdout


def test_generate_plays_environments_and_names_lost_episodes(tmp_path: Path) -> None:
    config = generation_workspace(tmp_path, 160)
    fault = '        1 / (len(row["input"]) % 5)\n'
    (tmp_path / "game.py").write_text(LOOK.replace("        self.digit", f"{fault}        self.digit", 1))
    overrides = ("--reward.remote_url=", "--env.max_turns=2", "--generate.max_samples=12", "--env.workers=2")
    words = (*overrides, f"--env.path={tmp_path / 'game.py'}")
    finished(config, tmp_path / "run", *words, command=COMMAND)
    lines = lines_of(tmp_path / "run" / "output.jsonl")
    lost = [line for line in lines if line["finish_reason"] == "lost"]
    assert lost
    assert {line["error"] for line in lost} == {"its environment failed: logs/reward.log"}
    for line in lines:
        if line["finish_reason"] is not None:  # else the row has no prompt
            assert (line in lost) == (len(line["prompt"]) % 5 == 0) == (line["score"] is None)
    assert "ZeroDivisionError" in (tmp_path / "run" / "logs" / "reward.log").read_text()
