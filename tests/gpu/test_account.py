"""A run's account of its GPUs: from the calls it makes, its records and the answers of its ranks."""

from __future__ import annotations

import json
import time
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from recorded_run import Clock
from safetensors.numpy import save_file
from steps import OnDemand, make_loop, make_step

from slurm_rlhf.algorithms.losses import KLController
from slurm_rlhf.cluster.stop import Stop
from slurm_rlhf.config.keys import changed
from slurm_rlhf.config.schema import Config
from slurm_rlhf.data.order import PromptOrder
from slurm_rlhf.errors import RunError
from slurm_rlhf.observe.timing import CallSpans
from slurm_rlhf.placement.memory import read_models
from slurm_rlhf.placement.model_shape import forward_flops, read_shape
from slurm_rlhf.placement.rank_map import NodeShare, RankMap
from slurm_rlhf.placement.topology import Topology
from slurm_rlhf.records import Experience, Sampling, SyncConnection
from slurm_rlhf.run.gpu_account import GpuAccount, StepFlops, slots_of
from slurm_rlhf.run.loop import TrainingLoop
from slurm_rlhf.run.prediction import PhaseSeconds, words
from slurm_rlhf.run.reporting import Reporting
from slurm_rlhf.run.self_check import PromptFindings, SelfCheck
from slurm_rlhf.run.step import TrainingStep
from slurm_rlhf.run.step_metrics import EngineMetrics
from slurm_rlhf.run_directory import RunDirectory
from slurm_rlhf.sampling.batches import Batch
from slurm_rlhf.wire.calls import (
    ActorCalls,
    DeviceReport,
    EngineCalls,
    ForwardBatch,
    GenerateBatch,
    PackedPrompts,
)
from slurm_rlhf.wire.handles import EngineHandle, RoleHandle, gather

MODEL = {
    "model_type": "qwen2",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 500,
    "tie_word_embeddings": False,
}
RANKS = RankMap(
    Topology.uniform(["n1"], 6),
    {
        "actor": [NodeShare("n1", (0, 1), (0, 1))],
        "critic": [NodeShare("n1", (2,), (0,))],
        "reference": [NodeShare("n1", (0, 1), (0, 1))],  # the actor's GPUs
        "rollout": [NodeShare("n1", (3, 4), (0, 1), ((0, 0), (0, 1)))],
    },
)
H100 = DeviceReport("NVIDIA H100 80GB HBM3", total=80 << 30, used=30 << 30, attention="")
WAY = SyncConnection("nccl", "ib0", "10.0.0.1", "n1")


class Server:
    """Ranks that answer when they are asked to, or at once where `answers` has something."""

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {}
        self.pending: dict[tuple[str, int, str], Future[Any]] = {}

    def call(self, role: str, rank: int, method: str, argument: Any, *_: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.pending[role, rank, method] = future
        answer = self.answers.get(method)
        if isinstance(answer, Exception):
            future.set_exception(answer)
        elif answer is not None:
            future.set_result(answer(role, rank))
        return future

    def finish(self, role: str, rank: int, method: str) -> None:
        self.pending[role, rank, method].set_result(None)


def handles(server: Server) -> dict[str, RoleHandle[Any]]:
    timeout = Config().timeout
    made = {role: RoleHandle(server, role, RANKS.world(role), timeout) for role in ("actor", "critic", "reference")}  # type: ignore[arg-type]
    return made | {"rollout": EngineHandle(server, "rollout", 2, 2, timeout)}  # type: ignore[arg-type]


def config(tmp_path: Path, **model: Any) -> Config:
    (tmp_path / "model").mkdir(exist_ok=True)
    (tmp_path / "model" / "config.json").write_text(json.dumps(MODEL | model))
    made = Config(run_dir=str(tmp_path))
    made.actor.model_name_or_path = str(tmp_path / "model")
    made.rollout.n_samples_per_prompt = made.rollout.batch_size = 2
    return made


def experience(prompts: list[int], responses: list[int]) -> Experience:
    return Experience(
        np.array(prompts, np.int32),
        np.array(responses, np.int32),
        np.zeros(sum(prompts + responses), np.int32),
        np.ones(sum(responses), np.bool_),
        np.zeros(len(prompts), np.float32),
    )


FOUR = experience([10, 10, 20, 20], [30, 40, 50, 60])
FORWARD, GENERATE = ForwardBatch(FOUR, []), GenerateBatch(PackedPrompts.pack([]), Sampling(), 0)


def watched(roles: dict[str, RoleHandle[Any]], clock: Clock) -> CallSpans:
    spans = CallSpans(clock)
    for role, handle in roles.items():
        handle.watchers.append(partial(spans.began, role))
    return spans


@pytest.fixture
def server() -> Server:
    made = Server()
    made.answers["memory"] = lambda role, rank: replace(
        H100,
        used=(30 + rank) << 30,
        attention={"rollout": "FLASH_ATTN", "actor": "sdpa: FLASH_ATTENTION"}.get(role, ""),
    )
    return made


def test_an_engine_works_on_all_of_its_gpus() -> None:
    slots = slots_of(RANKS)
    assert slots["rollout"] == [[("n1", 3), ("n1", 4)], [("n1", 4)]]
    assert slots["actor"] == slots["reference"] == [[("n1", 0)], [("n1", 1)]]


def test_idle_is_what_no_call_is_in_progress_for() -> None:
    """Calls that overlap count once, those of two roles on one GPU too; one that goes on is cut at the step's end."""
    clock = Clock(100.0)
    spans, slots = CallSpans(clock), slots_of(RANKS)
    first, second = spans.began("actor", 0, "values"), spans.began("actor", 0, "values")
    leader = spans.began("rollout", 0, "generate")
    clock.now += 2
    first()
    shared = spans.began("reference", 0, "logprobs")
    clock.now += 1
    second()
    leader()
    clock.now += 3
    shared()
    clock.now += 4
    begun = spans.began("critic", 0, "values")
    spans.began("reward", 7, "score")  # a rank of an earlier start
    found = spans.take()
    assert found.seconds == 10
    assert {gpu: found.idle(slots)["n1", gpu] for gpu in range(5)} == {0: 4, 1: 10, 2: 10, 3: 7, 4: 7}
    clock.now += 5
    assert spans.take().idle(slots)["n1", 2] == 0
    clock.now += 1
    begun()
    clock.now += 1
    assert spans.take().idle(slots)["n1", 2] == 1


def test_metrics_of_a_step(tmp_path: Path, server: Server) -> None:
    clock, roles = Clock(100.0), handles(server)
    stated: list[str] = []
    account = GpuAccount(config(tmp_path), RANKS, roles, 40.0, lambda: WAY, stated.append, clock)
    spans = watched(roles, clock)
    account.started()
    assert stated == ["GPUs: 5 x NVIDIA H100 80GB HBM3; GiB in use after start, of 80.0: actor 31.0, "
                                 "critic 30.0, reference 31.0, rollout 30.0"]  # fmt: skip
    clock.now += 50
    spans.take()
    calls = [
        *roles["actor"].start_all(ActorCalls.logprobs, FORWARD),
        roles["rollout"].call(0, EngineCalls.generate, GENERATE),
    ]
    clock.now += 6
    server.finish("rollout", 0, "generate")
    for rank in (0, 1):
        server.finish("actor", rank, "logprobs")
    gather(calls)
    clock.now += 4
    stated.clear()
    metrics = account.step(1, FOUR, spans.take(), {"time/step": 10.0, "time/update": 5.0})
    # GPUs 0, 1, 3 and 4 worked 6 of 10 s, the critic's none, and no role has the sixth of the node.
    assert metrics["perf/gpu_idle"] == pytest.approx((4 * 4 + 10) / 50)
    by_role = {role: metrics[f"perf/gpu_idle_{role}"] for role in RANKS.roles}
    assert by_role == {"actor": 0.4, "reference": 0.4, "critic": 1.0, "rollout": 0.4}
    assert metrics["perf/gpu_hours"] == pytest.approx(5 * (160 - 40) / 3600)
    made = config(tmp_path)
    flops = StepFlops(made, read_models(made))
    assert metrics["perf/mfu_update"] == pytest.approx(flops.update(FOUR, True) / (3 * 989.4e12 * 5))
    whole = flops.update(FOUR, True) + flops.others(FOUR)
    assert metrics["perf/mfu"] == pytest.approx(whole / (5 * 989.4e12 * 10))
    whole_run = {f"perf/{name}" for name in ("gpu_idle", "gpu_hours", "mfu", "mfu_update")}
    assert set(metrics) == {f"perf/gpu_idle_{role}" for role in RANKS.roles} | whole_run
    assert stated[0] == "attention: actor sdpa: FLASH_ATTENTION, critic sdpa, reference sdpa, rollout FLASH_ATTN"
    assert stated[1] == "weight transfer: nccl over ib0"
    assert stated[2].startswith("GPUs: MFU in updates 0.0 %, over the step 0.0 %, idle 52 % (actor 40, critic 100, ")
    noted = [len(stated)]
    for number in range(2, 43):
        account.step(number, FOUR, spans.take(), {"time/step": 10.0, "time/update": 5.0})
        noted.append(len(stated))
    assert np.diff(noted).tolist() == [0] * 19 + [1] + [0] * 19 + [1, 0]


def test_seconds_of_phases_stand_with_their_prediction(tmp_path: Path, server: Server) -> None:
    account = GpuAccount(config(tmp_path), RANKS, handles(server), 40.0, lambda: None, print, Clock(100.0))
    account.started()
    assert account.compared() == {}
    for seconds in (60.0, 5.0, 6.0, 7.0):  # kernels are compiled in the first step
        times = {"time/step": 2 * seconds, "time/update": seconds, "time/rollout": seconds / 2, "time/reward": 0.5}
        account.step(1, FOUR, CallSpans(Clock(100.0)).take(), times | {"time/sync_transfer": seconds / 4})
    found = account.compared()
    assert words(found).endswith(", reward of a function, not predicted/0.5")
    assert found.pop("reward").predicted is None
    assert {phase: each.measured for phase, each in found.items()} == {"update": 6.0, "sampling": 3.0}
    assert all(0 < each.predicted < 1 for each in found.values())
    save_file({"w": np.zeros((1000, 1000), np.float32)}, tmp_path / "model" / "model.safetensors")
    assert account.compared()["sync"] == PhaseSeconds(pytest.approx(2 * 2e6 / 100e9), 1.5)  # to two ranks, 800 Gbit/s


def test_hours_go_on_over_sessions(tmp_path: Path, server: Server) -> None:
    clock = Clock(100.0)
    first = GpuAccount(config(tmp_path), RANKS, {}, 100.0, lambda: None, print, clock)
    clock.now += 720
    assert first.hours() == 1.0
    second = GpuAccount(config(tmp_path), RANKS, {}, clock.now, lambda: None, print, clock)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    clock.now += 720
    assert second.hours() == 2.0
    assert second.summary()["hours"] == 2.0
    second.load_state_dict({})  # a checkpoint of a run without GPUs


@pytest.mark.parametrize("kind", ["card", "model", "silent"])
def test_what_is_not_known_is_left_out(tmp_path: Path, server: Server, kind: str) -> None:
    """A missing fact never ends a run."""
    made = config(tmp_path, **({"model_type": "novel"} if kind == "model" else {}))
    if kind == "card":
        server.answers["memory"] = lambda role, rank: replace(H100, gpu="Novel 9000")
    if kind == "silent":
        server.answers["memory"] = RunError("no")
    clock = Clock(100.0)
    stated: list[str] = []
    account = GpuAccount(made, RANKS, handles(server), 40.0, lambda: None, stated.append, clock)
    spans = CallSpans(clock)
    account.started()
    assert stated[1:] == (["no peak rate is known for Novel 9000: no MFU"] if kind == "card" else [])
    clock.now += 1
    metrics = account.step(1, FOUR, spans.take(), {"time/step": 1.0, "time/update": 0.5})
    assert not [name for name in metrics if "mfu" in name]
    assert metrics["perf/gpu_idle"] == pytest.approx(1.0)
    assert account.summary()["mfu"] is None


def test_flops_are_those_of_the_mathematics(tmp_path: Path) -> None:
    made = config(tmp_path)
    flops = StepFlops(changed(made, {}), read_models(made))
    shape = read_shape("actor.model_name_or_path", made.actor.model_name_or_path)
    one = experience([10], [30])
    body, logits = 40 * forward_flops(shape, 40, 0.0), 30 * 2.0 * shape.head
    assert flops.update(one, actor_trains=False) == pytest.approx(3 * body)
    assert flops.update(one, actor_trains=True) == pytest.approx(3 * (2 * body + logits))
    # Sampled, scored by actor and reference, valued by the critic.
    assert flops.others(one) == pytest.approx(4 * body + 3 * logits)
    two = experience([10, 10], [30, 30])  # one prompt, which is read once for both of its responses
    assert flops.others(two) == pytest.approx(2 * flops.others(one) - 10 * forward_flops(shape, 10, 0.0))
    made.train.max_epochs, made.algo.kl.init_coef = 3, 0.0
    again = StepFlops(made, read_models(made))
    assert again.update(one, True) == pytest.approx(3 * flops.update(one, True))
    assert again.others(one) == pytest.approx(3 * body + 2 * logits)
    made.algo.correction.bypass = True
    unscored = StepFlops(made, read_models(made))
    assert unscored.others(one) == pytest.approx(2 * body + logits)


def test_a_critic_that_starts_from_the_reward_model_has_its_shape(tmp_path: Path) -> None:
    made = config(tmp_path)
    smaller = tmp_path / "reward"
    smaller.mkdir()
    (smaller / "config.json").write_text(json.dumps(MODEL | {"num_hidden_layers": 1}))
    made.reward.model_name_or_path = str(smaller)
    flops = StepFlops(made, read_models(made))
    assert flops.models["critic"] == flops.models["reward"] == read_shape("reward.model_name_or_path", str(smaller))
    assert flops.models["critic"].parameters < flops.models["actor"].parameters


class Steps(TrainingStep):
    """Steps whose roles compute nothing, but are asked."""

    def collect(self, batch: Batch, version: int) -> Any:
        gather(self.roles["actor"].start_all(ActorCalls.logprobs, FORWARD))
        return FOUR, {"response_tokens": 8.0, "reward": 1.0, "kl": 0.0, "reward_clipped": 0.0}

    def update(
        self, number: int, trajectories: list[Any], experience: Any, metrics: dict[str, float], version: int
    ) -> dict[str, float]:
        with self.phases("update"):
            time.sleep(0.001)
        return metrics


def run(
    tmp_path: Path, roles: dict[str, RoleHandle[Any]], stop: Stop, on_gpus: bool, resume: bool = False
) -> TrainingLoop:
    made = config(tmp_path)
    made.logger.progress, made.logger.tensorboard = "plain", False
    made.train.self_check = False  # it has a test of its own, with roles that compute
    directory = RunDirectory(tmp_path)
    directory.make()
    reporting = Reporting(made, directory, RANKS.worlds)
    account = None
    if on_gpus:
        account = reporting.gpus = GpuAccount(made, RANKS, roles, time.monotonic(), lambda: WAY, reporting.note)
    order = PromptOrder(4, 1, 2, 0)
    step = make_step(
        made,
        roles,
        Steps,
        pool=SimpleNamespace(update=lambda version: {}),
        order=order,
        total_steps=4 if resume else 2,
        kl=KLController(0.0),
        self_check=SelfCheck(made, roles["actor"], reporting.note, PromptFindings({}), {}, None),  # type: ignore[arg-type]
        engine_metrics=EngineMetrics(str, reporting.note),
        stop=stop,
    )
    step.batches = OnDemand(lambda number: Batch(number, [], [], {}, 1.0, {**order.state_dict()}))
    return make_loop(step, directory, reporting, resume, gpus=account)


@pytest.mark.parametrize("on_gpus", [True, False], ids=["gpus", "cpus"])
def test_records_of_a_run(tmp_path: Path, server: Server, capsys: pytest.CaptureFixture[str], on_gpus: bool) -> None:
    """metrics.jsonl, summary.json and the console; a run on CPUs has none of it, and asks nobody."""
    for method in ("logprobs", "save", "load", "export"):
        server.answers[method] = lambda role, rank: "done"
    hours = []
    with Stop(tmp_path) as stop:
        for resume in (False, True):
            training = run(tmp_path, handles(server), stop, on_gpus, resume)
            training.run()
            training.reporting.finished()
            rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
            summary = json.loads((tmp_path / "summary.json").read_text())
            assert summary["status"] == "finished"
            console = capsys.readouterr().out
            ours = {name for row in rows for name in row if "gpu" in name or "mfu" in name}
            if not on_gpus:
                assert not ours
                assert "gpus" not in summary
                assert "GPU" not in console
                assert not [call for call in server.pending if call[2] == "memory"]
                continue
            assert {"perf/gpu_idle", "perf/gpu_hours", "perf/mfu", "perf/mfu_update", "perf/gpu_idle_critic"} < ours
            hours += [row["perf/gpu_hours"] for row in rows[-2:]]
            gpus = summary["gpus"]
            assert gpus["count"] == 5
            assert gpus["devices"] == ["NVIDIA H100 80GB HBM3"]
            assert gpus["attention"]["rollout"] == "FLASH_ATTN"
            assert gpus["weight_transfer"] == {"backend": "nccl", "interface": "ib0"}
            assert gpus["memory_gib"]["critic"] == 30.0
            assert 0 < gpus["mfu"] < 1
            assert 0 < gpus["idle_share"] <= 1
            assert gpus["hours"] >= hours[-1]
            assert "GiB in use after start, of 80.0: actor 31.0" in console
            assert "attention: actor sdpa: FLASH_ATTENTION" in console
            assert f"{gpus['hours']:.2f} GPU-hours" in console
    assert hours == sorted(hours)
