"""Evaluations: their data sets, and what a run makes of them."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from evaluated_runs import PROMPTS, Engines, make, rows
from sampled_responses import response
from steps import OnDemand
from waiting import HANG_S

from slurm_rlhf.algorithms.reward_shaping import RunningScale
from slurm_rlhf.checkpoint.resume import latest, load_state
from slurm_rlhf.cluster.stop import STOP_FILE, Stop, StopRequested
from slurm_rlhf.config.load import load_config
from slurm_rlhf.config.schema import Config
from slurm_rlhf.data.tokenizer import Tokenizer
from slurm_rlhf.errors import DataError, FilteredAway, RemoteError, RewardError
from slurm_rlhf.eval.report import ScoredResponse
from slurm_rlhf.eval.sets import Evaluation, read_eval_sets
from slurm_rlhf.records import Prompt, Sampling, Trajectory
from slurm_rlhf.rewards.function import RewardFunction
from slurm_rlhf.rewards.scored import Rewards, Scoring
from slurm_rlhf.run.loop import TrainingLoop
from slurm_rlhf.sampling.batches import Batch, EpisodesOver

HANGS = """
import threading, time
hang, began = threading.Event(), threading.Event()

def reward_func(responses, labels, step):
    if step and hang.is_set():
        began.set()
        while hang.is_set():
            time.sleep(0.01)
    return [float(response == label) for response, label in zip(responses, labels)]
"""


@pytest.fixture
def reward(tmp_path: Path) -> Iterator[RewardFunction]:
    file = tmp_path / "reward.py"
    file.write_text(HANGS)
    function = RewardFunction.load(str(file))
    yield function
    function.function.__globals__["hang"].clear()


def test_a_reward_that_hangs_in_an_evaluation_ends_the_run_in_its_time(
    tmp_path: Path, stop: Stop, reward: RewardFunction
) -> None:
    run = make(tmp_path, stop, reward)
    reward.function.__globals__["hang"].set()
    with pytest.raises(RewardError, match=r"did not return within 1 s for 4 responses; .* raise timeout\.reward"):
        run.run()
    assert run.state.eval_before == 1.0  # the function was still well then


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    ("error", "saved"),
    [(RewardError("no"), True), (RemoteError("no", role="reward"), True), (RemoteError("no", role="rollout"), False)],
)
def test_a_reward_that_raises_in_an_evaluation_costs_no_step(
    tmp_path: Path, stop: Stop, reward: RewardFunction, error: Exception, saved: bool, overlap: bool
) -> None:
    """Rewards of a function or a model. The run that goes on evaluates, unless the next step was sampled meanwhile."""
    errors = [error]

    def raises_once(prompts: list[Prompt], trajectories: list[Trajectory], step: int) -> Rewards:
        if step and errors:
            raise errors.pop()
        return reward(prompts, trajectories, step)

    words = {"steps": 4, "alongside": (lambda engines: engines.sample) if overlap else None}
    run = make(tmp_path, stop, reward, **words)
    run.evaluation.reward = Scoring(raises_once, 50.0)  # type: ignore[arg-type]
    with pytest.raises(type(error), match="no"):
        run.run()
    checkpoints = [path.name for path in (tmp_path / "checkpoints").glob("*")]
    assert checkpoints == ([f"step_{1 + overlap:06d}"] if saved else [])
    if saved:
        make(tmp_path, stop, reward, resume=True, **words).run()
        assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3, 4]
        assert [row["step"] for row in rows(tmp_path) if "eval" not in row] == ([1] if overlap else [])


@pytest.mark.parametrize("by", ["SIGTERM", "file"])
def test_a_stop_interrupts_it_and_the_run_that_goes_on_misses_nothing(
    tmp_path: Path, stop: Stop, reward: RewardFunction, by: str
) -> None:
    seen = reward.function.__globals__
    seen["hang"].set()
    run = make(tmp_path, stop, reward)
    run.step.reward = run.evaluation.reward = Scoring(reward, 50.0)

    def ask() -> None:
        seen["began"].wait(HANG_S)
        if by == "file":
            (tmp_path / STOP_FILE).touch()
        else:
            os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=ask, daemon=True).start()
    with pytest.raises(StopRequested):
        run.run()
    assert run.state.step == 1
    assert rows(tmp_path) == []  # the step's line waits for its evaluation
    assert run.reporting.moved
    state = load_state(tmp_path / "checkpoints" / "step_000001")
    assert state["unevaluated"]["reward"] == 1.0
    assert state["reward_scale"] == {"count": 3, "mean": 1.0, "m2": 2.0}

    seen["hang"].clear()
    stop.reason = None
    again = make(tmp_path, stop, reward, resume=True)
    again.step.scale = RunningScale()
    again.checkpoints.load(tmp_path / "checkpoints" / "step_000001", again.reporting.note)
    assert again.step.scale == RunningScale(3, 1.0, 2.0)
    again.run()
    assert [(row["step"], row["reward"], row["eval"]) for row in rows(tmp_path)] == [(1, 1.0, 1.0), (2, 2.0, 1.0)]
    assert all("time/step" in row for row in rows(tmp_path))
    last = load_state(tmp_path / "checkpoints" / "step_000002")
    assert "unevaluated" not in last


def test_a_checkpoint_of_an_earlier_version_has_nothing_to_say_of_either(
    tmp_path: Path, stop: Stop, reward: RewardFunction
) -> None:
    run = make(tmp_path, stop, reward)
    run.step.scale = None
    run.run()
    state = load_state(tmp_path / "checkpoints" / "step_000002")
    assert sorted(state) == ["kl", "order", "run"]
    assert make(tmp_path, stop, reward, resume=True).step.scale == RunningScale(3, 1.0, 2.0)


def test_a_function_s_own_time_out_is_reported_as_its_own(tmp_path: Path) -> None:
    file = tmp_path / "reward.py"
    file.write_text("def reward_func(responses):\n    raise TimeoutError('the judge')\n")
    with pytest.raises(RewardError, match=r"reward\.py:2: reward_func raised TimeoutError: the judge"):
        Scoring(RewardFunction.load(str(file)), 5.0)(PROMPTS, Engines().sample(PROMPTS, Sampling(), 0), 1)


def refuse_second(run: TrainingLoop, error: Exception) -> None:
    sample = run.step.batches.take

    def take(number: int) -> Batch:
        if number == 2:
            raise error
        return sample(number)

    run.step.batches = OnDemand(take)


@pytest.mark.parametrize("every", [0, 1])
def test_a_run_whose_prompts_are_used_up_ends_as_after_its_last_step(
    tmp_path: Path, stop: Stop, reward: RewardFunction, every: int
) -> None:
    run = make(tmp_path, stop, reward)
    run.step.config.eval.steps = every
    refuse_second(run, EpisodesOver(2, 1, 4))
    run.run()
    assert run.state.step == 1
    assert run.state.eval_after == 1.0
    (row,) = rows(tmp_path)
    assert row["step"] == 1
    assert row["perf/tokens_per_s"] * row["time/step"] == pytest.approx(8)  # tokens of a step
    assert row["perf/rollout_tokens_per_s"] == 8  # whose sampling took a second
    assert latest(tmp_path / "checkpoints") == tmp_path / "checkpoints" / "step_000001"


def test_a_run_of_which_nothing_passes_saves_what_it_has_learnt(
    tmp_path: Path, stop: Stop, reward: RewardFunction
) -> None:
    run = make(tmp_path, stop, reward)
    refuse_second(run, FilteredAway("step 2: dynamic sampling kept 0 of 36 groups"))
    with pytest.raises(FilteredAway):
        run.run()
    assert latest(tmp_path / "checkpoints") == tmp_path / "checkpoints" / "step_000001"


# --- eval sets --------------------------------------------------------------------------------------------------------


FILES = {
    "sums": [{"input": f"{n}+1=", "label": str(n + 1), "part": "odd" if n % 2 else "even"} for n in range(6)],
    "words": [{"question": f"say {n}", "answer": n} for n in range(3)],
}
TEXT = """
[data]
max_len = 64
[rollout]
max_new_tokens = 8
[[eval.datasets]]
path = "sums.jsonl"
source_key = "part"
[[eval.datasets]]
path = "sums.jsonl"
name = "sampled"
temperature = 1.0
n_samples_per_prompt = 2
[[eval.datasets]]
path = "words.jsonl"
input_key = "question"
label_key = "answer"
"""


def config_of(tmp_path: Path, text: str = TEXT) -> Config:
    for name, lines in FILES.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    (tmp_path / "run.toml").write_text(text)
    return load_config(tmp_path / "run.toml")


def test_data_sets_that_are_sampled_alike_go_to_the_engines_together(tmp_path: Path, tokenizer: Tokenizer) -> None:
    asked: list[tuple[int, float, int]] = []

    def sample(prompts: list[Prompt], sampling: Sampling, version: int) -> list[Trajectory]:
        asked.append((len(prompts), sampling.temperature, version))
        assert len({prompt.index for prompt in prompts}) == len(prompts)  # engines know requests by it
        return [
            response(prompt.index, f"{prompt.text}{number}", number, prompt_ids=prompt.token_ids)
            for prompt in prompts
            for number in range(sampling.n)
        ]

    def reward(prompts: list[Prompt], found: list[Trajectory], step: int) -> Rewards:
        assert [prompt.text for prompt in prompts] == [one.text[:-1] for one in found]
        right = np.array([one.text.endswith("0") for one in found], np.float32)
        return Rewards(right * 2, right)

    config = config_of(tmp_path)
    sets = read_eval_sets(config, tokenizer)
    assert [len(one.prompts) for one in sets] == [6, 6, 3]
    assert [prompt.label for prompt in sets[2].prompts] == [0, 1, 2]
    scoring = Scoring(reward, 5.0)  # type: ignore[arg-type]
    found = Evaluation(config, sets, tmp_path / "eval", sample, scoring).run(3, 7)
    assert asked == [(9, 0.0, 7), (6, 1.0, 7)]
    assert found.metrics["eval/sums/mean"] == 1.0
    assert found.metrics["eval/sampled/mean"] == 0.5
    assert found.metrics["eval/sampled/pass@2"] == 1.0
    assert found.metrics["eval"] == pytest.approx((1 + 0.5 + 1) / 3)
    assert [part.name for part in found.reports[0].sources] == ["even", "odd"]
    lines = (tmp_path / "eval" / "step_000003.jsonl").read_text().splitlines()
    kept = [ScoredResponse(**json.loads(line)) for line in lines]
    assert [(one.dataset, one.index, one.sample) for one in kept[6:10]] == [
        *(("sampled", 0, 0), ("sampled", 0, 1), ("sampled", 1, 0), ("sampled", 1, 1))
    ]
    assert (kept[0].source, kept[0].reward, kept[0].score) == ("even", 2.0, 1.0)


@pytest.mark.parametrize(
    ("before", "after", "stated"),
    [
        ('source_key = "part"', 'source_key = "prat"', "row 0 has no column 'prat' (columns: input, label, part)"),
        ('label_key = "answer"', 'label_key = "anwser"', "set label_key of the data set 'words' to a column"),
        (
            'input_key = "question"',
            'input_key = "input"',
            "words.jsonl:1: no column 'input' (columns: question, answer",
        ),
    ],
)
def test_a_column_that_is_missing(tmp_path: Path, tokenizer: Tokenizer, before: str, after: str, stated: str) -> None:
    with pytest.raises(DataError) as raised:
        read_eval_sets(config_of(tmp_path, TEXT.replace(before, after)), tokenizer)
    assert stated in str(raised.value)
