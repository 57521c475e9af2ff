"""A run that samples while it trains, stopped and resumed in the middle: weights change under responses in flight."""

from __future__ import annotations

import json
from pathlib import Path
from socket import gethostname

import pytest
from patched_ranks import patched_engines
from training_runs import metrics, started, train, workspace

from slurm_rlhf.data.order import PromptOrder

pytestmark = [pytest.mark.engine, pytest.mark.slow]

PROMPTS, SAMPLES, STEPS = 8, 4, 6
SILENCE = 3
WORLD = (
    "--vllm.sync_mode=inflight",
    "--train.full_determinism=false",
    f"--rollout.batch_size={PROMPTS}",
    f"--rollout.n_samples_per_prompt={SAMPLES}",
    "--rollout.max_new_tokens=48",
    "--vllm.max_num_seqs=8",
    "--train.staleness_threshold=1",  # so much that the engine is not through with it when the weights come
    "--train.batch_size=32",
    "--train.max_epochs=1",
    f"--train.max_steps={STEPS}",
    "--algo.kl.init_coef=0",
    "--eval.steps=2",
    "--ckpt.save_steps=1",
    f"--timeout.sync_silence={SILENCE}",
)

REWARD = """
import json
from pathlib import Path

def reward_func(queries, prompts, labels, **kwargs):
    with Path(__file__).with_name("asked.jsonl").open("a") as file:
        file.write(json.dumps(prompts) + "\\n")
    return [float(len(response) % 3) for response in kwargs["responses"]]
"""


PATIENT = """
import os, signal, subprocess, time
from pathlib import Path

STOPPED = Path(__file__).with_name("stopped")
BATCH = 32  # responses

def change(module):
    step, load = module.VllmEngine.step, module.VllmEngine.load
    def slow_step(engine):
        training = any(active.request.sampling.temperature for active in engine._active.values())
        if training and 0 < engine.patience <= 1200:
            engine.patience -= 1
            time.sleep(0.05)
            return []
        landed = step(engine)
        if training:
            engine.served += len(landed)
            if engine.served >= BATCH:
                engine.served, engine.patience = engine.served - BATCH, 1300
            elif engine.patience > 0:
                engine.patience -= 1
                time.sleep(0.02)
        return landed
    def patient_load(engine, weights, version):
        load(engine, stand_still(engine, weights) if version == 2 else weights, version)
        if not engine.loaded:  # what it answered for the self-check is no part of a batch
            engine.loaded, engine.served = True, 0
        engine.patience = 0
    def stand_still(engine, weights):
        for number, pair in enumerate(weights):
            if number == 5 and not STOPPED.exists():
                STOPPED.write_text(str(len(engine._active)))
                wake = f"sleep 6; kill -CONT {os.getpid()}"
                subprocess.Popen(["sh", "-c", wake], start_new_session=True)
                os.kill(os.getpid(), signal.SIGSTOP)
            yield pair
    module.VllmEngine.served = module.VllmEngine.patience = 0
    module.VllmEngine.loaded = False
    module.VllmEngine.step, module.VllmEngine.load = slow_step, patient_load
"""
"""Once a batch is served the engine does 100 more steps, in which every response begun before ends, and then none until
new weights come, for a minute at most: they meet the next batch half way however busy the machine is. Evaluations,
which are greedy, do not wait. In the update to policy version 2 its process stands still for six seconds."""


BATCHES = ("--reward.workers=0",)
"""One call of the reward function takes a whole batch, so that it sees which prompts are trained on together."""


class Whole:
    """A run that SIGTERM stopped after its second step, with requests in flight, and the one that went on."""

    def __init__(self, path: Path) -> None:
        config = workspace(path, REWARD)
        self.run_dir = path / "run"
        self.path = path
        with patched_engines(path / "patch", PATIENT):
            self._train(config)
        self.rows = metrics(self.run_dir)

    def _train(self, config: Path) -> None:
        with started(config, self.run_dir, *WORLD, *BATCHES, warm=True) as run:
            run.wait_for_step(2)
            run.process.terminate()
            self.stopped, self.first = run.wait()
            self.log = run.log()
        self.saved = json.loads((self.run_dir / "summary.json").read_text())
        self.state = json.loads(max((self.run_dir / "checkpoints").glob("*/state.json")).read_text())
        self.code, self.second = train(config, self.run_dir, *WORLD, *BATCHES, warm=True)

    def asked(self) -> list[list[str]]:
        """Prompts of the batches that were scored, in order; of a batch done again only the last time."""
        lines = [json.loads(line) for line in (self.path / "asked.jsonl").read_text().splitlines()]
        batches = [list(dict.fromkeys(line)) for line in lines if len(line) == PROMPTS * SAMPLES]
        done = self.saved["steps"]
        return batches[:done] + batches[len(batches) - (STEPS - done) :]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    made = Whole(tmp_path_factory.mktemp("inflight"))
    assert made.stopped == 143, made.first
    assert made.code == 0, made.second
    return made


def test_updates_meet_responses_in_flight_and_none_is_dropped(whole: Whole) -> None:
    rows = whole.rows
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    for row in rows:
        assert row["perf/engine/0/responses"] > 0
    # Not the first ones after a start, which nothing was sampled ahead of.
    assert sum(row["mixed_responses"] > 0 for row in rows) >= 2
    assert rows[-1]["policy_version"] == STEPS


def test_responses_survive_an_update_that_breaks_off_under_them(whole: Whole) -> None:
    assert int((whole.path / "patch" / "stopped").read_text()) > 0  # so many were in flight
    stated = next(line for line in whole.log.splitlines() if "once more over a new group" in line)
    assert f"heard nothing from rollout 0 on {gethostname()}" in stated
    assert f"for {SILENCE} s (timeout.sync_silence)" in stated
    assert whole.rows[1]["perf/sync_group"] > whole.rows[0]["perf/sync_group"]


def test_no_token_is_older_than_the_bound(whole: Whole) -> None:
    assert any(row["staleness_max"] == 1 for row in whole.rows)
    for row in whole.rows:
        assert row["staleness_max"] <= 1
        assert 0 <= row["stale_tokens"] <= 1
        assert (row["stale_tokens"] > 0) == (row["staleness_max"] > 0) == ("stale_logprob_diff" in row)
    # The first step after a start has nothing that could have been sampled ahead.
    for step in (1, whole.saved["steps"] + 1):
        assert whole.rows[step - 1]["stale_tokens"] == 0


def test_engine_and_actor_are_compared_under_the_same_policy_only(whole: Whole) -> None:
    compared = [row["rollout_logprob_diff_max"] for row in whole.rows if "rollout_logprob_diff_max" in row]
    moved = [row["stale_logprob_diff"] for row in whole.rows if "stale_logprob_diff" in row]
    assert len(compared) >= 2
    assert max(compared) < 1e-5
    assert max(moved) > 100 * max(compared)


def test_tokens_of_an_older_policy_are_corrected_by_their_ratio_to_it(whole: Whole) -> None:
    """By tis, without being asked for."""
    names = ("k1", "k3", "chi2", "ess", "log_rho_max", "truncated", "dropped")
    for row in whole.rows:
        assert {f"correction/{name}" for name in names} <= set(row)
        assert row["correction/not_finite"] == 0
        assert ("correction/age_1/k3" in row) == (row["stale_tokens"] > 0)
        if row["stale_tokens"] > 0:
            assert row["correction/age_1/log_rho_mean"] == pytest.approx(row["stale_logprob_diff"], rel=1e-5)
            assert row["correction/ess"] < 1 - 1e-6
        else:
            assert row["correction/ess"] == pytest.approx(1, abs=1e-9)
        if "correction/age_0/k3" in row:
            assert row["correction/age_1/k3"] > 100 * row["correction/age_0/k3"]
    assert any("correction/age_0/k3" in row for row in whole.rows)  # in one batch
    assert 'preset = "auto"' in (whole.run_dir / "config.toml").read_text()


def test_every_prompt_is_trained_on_once(whole: Whole) -> None:
    """Not batch by batch: a batch has what is finished. What was in flight at the stop is sampled again."""
    rows = [json.loads(line)["input"] for line in (whole.path / "prompts.jsonl").read_text().splitlines()]
    order = PromptOrder(len(rows), PROMPTS, 1, 42)
    expected = [rows[position] for _ in range(STEPS) for position in order.next() or []]
    assert all(len(batch) == PROMPTS for batch in whole.asked())
    assert sorted(prompt for batch in whole.asked() for prompt in batch) == sorted(expected)


def test_a_checkpoint_stands_behind_the_last_batch_that_was_trained_on(whole: Whole) -> None:
    assert whole.saved["status"] == "stopped"
    assert 2 <= whole.saved["steps"] < STEPS
    assert whole.state["order"]["taken"] == whole.state["run"]["step"] == whole.saved["steps"]
    assert f"resuming from {whole.run_dir / 'checkpoints'}" in whole.second
    assert all("eval" in row for row in whole.rows if row["step"] % 2 == 0)
