"""Files that a stage leaves behind while it trains, and the step that it goes on from."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from slurm_rlhf.config.schema import Config
from slurm_rlhf.data.order import OrderKeys, PromptOrder
from slurm_rlhf.errors import CheckpointError, ConfigError
from slurm_rlhf.observe.sinks import TrackedRun
from slurm_rlhf.run_directory import RunDirectory
from slurm_rlhf.stages.record import StageRecord
from slurm_rlhf.trainer.distributed import World


@pytest.fixture(autouse=True)
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """A configuration that says where the model goes; ranks wait for no other."""
    monkeypatch.setattr("torch.distributed.barrier", lambda **_: None)
    made = Config()
    made.sft.output_dir = str(tmp_path / "out")
    return made


ALONE = World(0, 1, torch.device("cpu"))


def rows(directory: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (directory / "out.run" / "metrics.jsonl").read_text().splitlines()]


def test_metrics_of_a_start_without_a_checkpoint_are_put_aside(config: Config, tmp_path: Path) -> None:
    for start in range(3):
        record = StageRecord("sft", config, ALONE)
        assert record.begin(9) == (None, {})
        with record:
            record.step(1, {"loss": float(start)})
    names = ["config.toml", "metrics.1.jsonl", "metrics.2.jsonl", "metrics.jsonl", "report.html", "summary.json"]
    names += ["tensorboard", "tensorboard.1", "tensorboard.2"]
    assert sorted(path.name for path in (tmp_path / "out.run").iterdir()) == names
    assert [row["loss"] for row in rows(tmp_path)] == [2.0]


def test_a_page_that_cannot_be_written_ends_no_stage(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object) -> None:
        raise ValueError("no number")

    monkeypatch.setattr("slurm_rlhf.stages.record.write_page", broken)
    record = StageRecord("sft", config, ALONE)
    record.begin(1)
    record.finished()
    assert json.loads((tmp_path / "out.run" / "summary.json").read_text())["status"] == "finished"
    assert "warning: report.html was not written: ValueError: no number" in capsys.readouterr().out


def test_a_checkpoint_is_of_one_number_of_steps(config: Config, tmp_path: Path) -> None:
    record = StageRecord("sft", config, ALONE)
    record.begin(9)
    for step in (1, 2, 3, 4):
        record.step(step, {"loss": 0.5})
        if step < 4:
            record.save(step, 9, {"taken": step}, lambda directory: (directory / "weights").write_bytes(b"w") and None)
    checkpoint, state = StageRecord("sft", config, ALONE).begin(9)
    assert (checkpoint.name, state["step"], state["order"]) == ("step_000003", 3, {"taken": 3})
    assert [path.name for path in checkpoint.parent.iterdir()] == ["step_000003"]
    assert len(rows(tmp_path)) == 3, "the step behind the checkpoint is done again"
    with pytest.raises(CheckpointError, match=r"of a training of 9 steps, and this one has 8.*--resume=never"):
        StageRecord("sft", config, ALONE).begin(8)
    config.resume = "never"
    assert StageRecord("sft", config, ALONE).begin(8) == (None, {})


def test_a_checkpoint_goes_on_under_its_own_keys(
    config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Changed keys of the training are named, and those that change what its state means are refused."""
    model = {"model": "1"}
    keys = OrderKeys("sft.dataset", "sft.batch_size", "sft.output_dir")
    record, order = StageRecord("sft", config, ALONE), PromptOrder(40, 4, 1, 0, keys=keys)
    record.begin(9, model, order)
    record.save(3, 9, order.state_dict(), lambda directory: (directory / "weights").write_bytes(b"w") and None)
    RunDirectory(tmp_path / "out.run").config.unlink()
    config.sft.learning_rate = 0.5
    StageRecord("sft", config, ALONE).begin(9, model, order)
    assert "sft: warning: changed since step 3: sft.learning_rate 1e-05 -> 0.5\n" in capsys.readouterr().out
    with pytest.raises(CheckpointError, match=r"^sft\.batch_size is 8 and was 4 .* in another --sft\.output_dir"):
        StageRecord("sft", config, ALONE).begin(5, model, PromptOrder(40, 8, 1, 0, keys=keys))
    with pytest.raises(ConfigError, match=r"holds another model than model did .* another --sft\.output_dir"):
        StageRecord("sft", config, ALONE).begin(9, {"model": "2"}, order)
    config.lora.alpha = 64.0
    with pytest.raises(ConfigError, match=r"^lora\.alpha 16\.0 -> 64\.0: the adapters in the checkpoint were trained"):
        StageRecord("sft", config, ALONE).begin(9, model, order)


@pytest.mark.parametrize("rank", [0, 1])
def test_trackers_get_what_a_stage_measures_from_its_first_rank(
    config: Config, rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[Any] = []

    class Tracker:
        def __init__(self, name: str, log: Path, close_s: float) -> None:
            assert log.parent.is_dir()

        def open(self, run: TrackedRun) -> str:
            calls.append((run.name, run.directory, run.config["sft.batch_size"]))
            return "wandb: sync it"

        def news(self) -> str:
            return ""

        def metrics(self, step: int, metrics: dict[str, float]) -> None:
            calls.append((step, metrics))

        def close(self, failed: bool) -> None:
            calls.append(failed)

    monkeypatch.setattr("slurm_rlhf.observe.trackers.ProcessSink", Tracker)
    config.logger.use = ["wandb"]
    for failure in (None, RuntimeError):
        record = StageRecord("sft", config, World(rank, 2, torch.device("cpu")))
        record.begin(9)
        with pytest.raises(RuntimeError) if failure else nullcontext(), record:
            record.step(1, {"loss": 0.5})
            if failure:
                raise failure
    opened = ("out.run", str(tmp_path / "out.run" / "trackers" / "wandb"), config.sft.batch_size)
    one = [opened, (1, {"loss": 0.5})]
    assert calls == ([*one, False, *one, True] if rank == 0 else [])
    assert capsys.readouterr().out == ("sft: wandb: sync it\n" * 2 if rank == 0 else "")
