"""The log-probs of DPO's reference: kept as they are computed, and found by other trainings of the same model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import make_tiny

from slurm_rlhf.cluster.stop import USR1
from slurm_rlhf.config.schema import Config
from slurm_rlhf.data.tokenizer import Tokenizer
from slurm_rlhf.records import F32
from slurm_rlhf.stages.examples import Examples, load_pairs
from slurm_rlhf.stages.kinds import DpoTrainer
from slurm_rlhf.stages.record import StageRecord, StopSignals
from slurm_rlhf.trainer.distributed import World


class Computer(DpoTrainer):
    """Has answers without a model, and gets a signal after a number of pieces."""

    def __init__(self, config: Config, last: int) -> None:
        self.config, self.world, self.last = config, World(0, 1, torch.device("cpu")), last
        self.signals = StopSignals()
        self.pieces: list[int] = []

    def of_all(self, examples: Examples, answer: Any, of_rows: bool) -> F32:
        self.pieces.append(len(examples))
        if len(self.pieces) == self.last:
            self.signals.reason = USR1
        rows = examples.experience
        sums = np.add.reduceat(rows.token_ids, rows.token_offsets[:-1])
        return np.repeat(sums, rows.response_lens).astype(np.float32)


def test_a_pass_that_is_cut_off_goes_on_and_serves_other_trainings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.distributed.barrier", lambda **_: None)
    monkeypatch.setattr("torch.distributed.all_reduce", lambda tensor, op=None: None)
    config = Config()
    config.actor.model_name_or_path = str(make_tiny(tmp_path / "model"))
    config.dpo.batch_size, config.data.max_len = 2, 16
    (tmp_path / "pairs.jsonl").write_text(
        "".join(f'{{"input": "1+{n}=", "chosen": "{n + 1}", "rejected": "0{n}{n}"}}\n' for n in range(1, 8))
    )
    tokenizer = Tokenizer.load(config.actor.model_name_or_path)

    def examples() -> Examples:
        return load_pairs(tmp_path / "pairs.jsonl", tokenizer, config.data)

    def prepared(name: str, last: int = 0) -> tuple[bool, list[int], Any]:
        config.dpo.output_dir = str(tmp_path / name)
        read = examples()
        record = StageRecord("dpo", config, World(0, 1, torch.device("cpu")))
        record.root.mkdir(exist_ok=True)
        record.model = {config.actor.model_name_or_path: "hash"}
        computer = Computer(config, last)
        done = computer.prepare(read, record, computer.signals)
        return done, computer.pieces, read.experience.columns.get("ref_logprobs")

    assert prepared("one", last=2) == (False, [2, 2], None)
    (parts,) = (tmp_path / "one.run").glob("reference-*.parts")
    with parts.open("ab") as file:
        file.write(b"torn")
    done, pieces, found = prepared("one")
    assert (done, pieces) == (True, [2, 1])
    done, pieces, again = prepared("two")
    assert (done, pieces) == (True, [])
    assert again.tolist() == found.tolist()
    assert [path.suffix for path in (tmp_path / "one.run").glob("reference-*")] == [".npy"]
    assert again.tolist() == Computer(config, 0).of_all(examples(), None, of_rows=False).tolist()
