"""`stage_race.py` and `stage_losses.py` without TRL and without their runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import stage_race
import torch
from random_models import tiny_tokenizer
from stage_losses import Answer
from stage_race import Pair, Run, Trained, Watch, seeds_apart
from stage_task import MAX_LEN, Lengths, config_of, rows, tokens, write

from slurm_rlhf.config.load import load_config
from slurm_rlhf.data.tokenizer import Tokenizer
from slurm_rlhf.stages.stage import stage_trainer

LENGTHS = Lengths(48, 1.0, 448)
PAIRS = [
    Pair(Trained([0.7, 0.5], 1000, 2.0, 1.0), Trained([0.7, 0.25], 1000, 8.0, 3.0)),
    Pair(Trained([0.6, 0.75], 1000, 1.0, 1.0), Trained([0.6, 0.75], 1000, 2.0, 5.0)),
]


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


def test_a_pair_compares_tokens_by_seconds_and_losses_by_steps() -> None:
    assert [pair.ratio(lambda run: run.seconds) for pair in PAIRS] == [4.0, 2.0]
    assert [pair.ratio(lambda run: run.cpu_seconds) for pair in PAIRS] == [3.0, 5.0]
    assert [pair.apart for pair in PAIRS] == [0.25, 0.0]
    assert seeds_apart(PAIRS) == 0.25


def test_what_is_timed_begins_behind_the_first_step_and_for_dpo_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stated = "sft: step 1/4\nsft: step 2/4\nsft: step 3/4\nsft: step 4/4\n"
    begun: list[list[str]] = []

    def train(command: list[str], log: Path, read: Watch) -> None:
        begun.append(command)
        config = load_config(command[-1])
        stage = "dpo" if config.dpo.dataset else "sft"
        out = tmp_path / stage / "out.run"
        out.mkdir()
        (out / "metrics.jsonl").write_text("".join(json.dumps({"step": k, "loss": 1 / k}) + "\n" for k in (1, 2, 3, 4)))
        first = "dpo: computing the reference's log-probs of 8 examples, once\n" if stage == "dpo" else ""
        for line in (first + stated.replace("sft", stage)).splitlines():
            read(line)
        (log.parent / "stated").write_text(str(len(read.seen)))

    monkeypatch.setattr(stage_race.task, "run_process", train)
    monkeypatch.setattr(stage_race, "check_stage", lambda config, name: None)
    options = stage_race.task.parser("", **stage_race.DEFAULTS).parse_args(["--steps=4", "--batch=2"])
    for stage, first in (("sft", 2), ("dpo", 0)):
        run = Run(stage, tmp_path / stage, tmp_path / "model", 1, options)
        found = run.ours()
        examples = [json.loads(line) for line in (tmp_path / stage / "rows.jsonl").read_text().splitlines()]
        assert found.tokens == sum(map(tokens, examples[first:6]))
        assert found.losses == [1, 1 / 2, 1 / 3, 1 / 4]
    assert begun[0][:3] == ["env", "OMP_WAIT_POLICY=PASSIVE", "KMP_BLOCKTIME=0"]


def test_gradients_are_compared_by_name_and_relative_to_the_peers() -> None:
    peer = Answer(1.0, {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([4.0])})
    ours = Answer(1.0, {"a": torch.tensor([3.0, 1.0]), "b": torch.tensor([4.0])})
    assert peer.apart(ours) == pytest.approx(1 / 5)
    with pytest.raises(KeyError, match="b"):
        peer.apart(Answer(1.0, {"a": ours.gradient["a"]}))
