"""`stage_race.py` and `stage_losses.py` without TRL and without their runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from random_models import tiny_tokenizer
from stage_task import MAX_LEN, Lengths, config_of, rows, tokens, write

from slurm_rlhf.data.tokenizer import Tokenizer
from slurm_rlhf.stages.kinds import stage_trainer

LENGTHS = Lengths(48, 1.0, 448)


@pytest.mark.parametrize("kind", ["sft", "rm", "dpo", "kto"])
def test_our_stage_reads_as_many_tokens_as_are_counted(kind: str, tmp_path: Path) -> None:
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    examples = rows(kind, 40, LENGTHS, seed=3)
    stage, keys = ("dpo", {"loss_type": "kto"}) if kind == "kto" else (kind, {})
    config = config_of(stage, tmp_path / "model", write(tmp_path / "rows.jsonl", examples), tmp_path / "out", keys)
    found = stage_trainer(config, stage).read(tmp_path / "rows.jsonl", Tokenizer.load(tmp_path / "model"), config.data)
    assert (len(found), config.data.max_len) == (40, MAX_LEN)
    lengths = found.experience.lengths.reshape(40, -1)
    counted = lengths[:, 0] if kind == "kto" else lengths.sum(axis=1)  # its other row is for the divergence
    assert counted.tolist() == list(map(tokens, examples))
    assert examples == rows(kind, 40, LENGTHS, seed=3) != rows(kind, 40, LENGTHS, seed=4)
