"""A run with two engines of which one is ten times slower: it takes less, and is named.

How little it delays a batch is counted in sequences that it holds: `engine/test_tp.py`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from patched_ranks import patched_engines
from training_runs import metrics, started, workspace

pytestmark = [pytest.mark.engine, pytest.mark.slow]

NEW_TOKENS = 16
PROMPTS = 40
HELD = 6
"""Responses that an engine has at once: four that it computes, two that wait."""
STEPS = 6
WORLD = (
    "--train.full_determinism=false",
    "--vllm.num_engines=2",
    "--vllm.max_num_seqs=4",
    f"--rollout.batch_size={PROMPTS}",
    "--rollout.n_samples_per_prompt=1",
    f"--rollout.max_new_tokens={NEW_TOKENS}",
    f"--train.batch_size={PROMPTS}",
    f"--train.max_steps={STEPS}",
    "--train.num_episodes=2",
    "--algo.kl.init_coef=0",
    "--eval.dataset=",
)

SLOWER = """
import time

def change(module):
    step = module.VllmEngine.step
    def slow_step(engine):
        began = time.monotonic()
        landed = step(engine)
        time.sleep(9 * (time.monotonic() - began))
        return landed
    module.VllmEngine.step = slow_step
"""


@pytest.fixture(scope="module")
def slowed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """(run directory, what it printed) of a run whose second engine sleeps nine times as long as it computes."""
    path = tmp_path_factory.mktemp("slowed")
    with patched_engines(path / "patch", SLOWER, ranks=("1",)):
        with started(workspace(path), path / "run", *WORLD, warm=True) as run:
            code, output = run.wait()
    assert code == 0, output
    return path / "run", output


def engine(row: dict[str, Any], index: int) -> dict[str, float]:
    prefix = f"perf/engine/{index}/"
    return {name.removeprefix(prefix): value for name, value in row.items() if name.startswith(prefix)}


def together(run_dir: Path) -> list[dict[str, Any]]:
    """The steps in which both engines took part: a run begins with the one that is ready first."""
    rows = [row for row in metrics(run_dir) if engine(row, 0) and engine(row, 1)]
    assert len(rows) >= STEPS - 2
    return rows


def test_the_slow_engine_takes_fewer_prompts(slowed: tuple[Path, str]) -> None:
    """Its part of a batch is that of its measured speed: on a busy machine the other one is slower, too."""
    rows = together(slowed[0])[1:]  # the first step is a cold start of both
    taken = [(engine(row, 0)["responses"], engine(row, 1)["responses"]) for row in rows]
    parts = []
    for row in rows:
        fast, slow = engine(row, 0)["tokens_per_s"], engine(row, 1)["tokens_per_s"]
        parts.append(PROMPTS * slow / (fast + slow))
    print("responses of the fast and of the slow engine:", taken, "by speed:", *(f"{part:.1f}" for part in parts))
    for (fast, slow), part in zip(taken, parts, strict=True):
        assert fast + slow == PROMPTS
        assert 4 <= slow <= part + HELD  # it was given its first ones, and they came back
    assert sum(slow for _, slow in taken) < sum(fast for fast, _ in taken)


def test_it_is_named_on_the_terminal_and_in_the_log(slowed: tuple[Path, str]) -> None:
    run_dir, output = slowed
    (log,) = (run_dir / "logs").glob("conductor.*.log")
    node = log.name.removeprefix("conductor.").removesuffix(".0.log")
    told = re.search(
        rf"^step (\d): engine 1 on {re.escape(node)} is far below its peers for 2 steps: .*$", output, re.M
    )
    assert told is not None
    rate = engine(metrics(run_dir)[int(told[1]) - 1], 1)["tokens_per_s"]
    assert f" {rate:.0f} tokens/s, the others' median is " in told[0]
    assert told[0] in log.read_text()
    assert "engine 0 on" not in output


def test_every_step_has_tokens_queue_and_kv_use_of_each_engine(slowed: tuple[Path, str]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    rows = together(slowed[0])[1:]
    for row in rows:
        for index in (0, 1):
            found = engine(row, index)
            assert set(found) == {"tokens_per_s", "busy_s", "responses", "running", "waiting", "kv_usage"}
            assert found["tokens_per_s"] > 0
            assert 0 < found["running"] <= 4
            assert 0 < found["waiting"] <= 2  # what it holds beyond its four places
            assert 0 < found["kv_usage"] <= 1
        assert sum(engine(row, index)["tokens_per_s"] * engine(row, index)["busy_s"] for index in (0, 1)) == (
            pytest.approx(row["response_tokens"])
        )
    events = EventAccumulator(str(slowed[0] / "tensorboard"))
    events.Reload()
    shown = [event.step for event in events.Scalars("perf/engine/1/kv_usage")]
    assert shown[-len(rows) :] == [row["step"] for row in rows]
