"""What a run says of its checkpoints, and when it no longer goes on by itself."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from lookalikes import llama_like

from slurm_rlhf.config.schema import Config
from slurm_rlhf.controller.conductor import MOST_RESTARTS, refuse_restart
from slurm_rlhf.controller.reporting import Reporting
from slurm_rlhf.controller.startup import Inputs
from slurm_rlhf.errors import ConfigError
from slurm_rlhf.run_directory import RunDirectory


def test_a_checkpoint_that_takes_too_long_for_the_signals_lead_is_warned_of_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = Config()
    config.logger.progress, config.logger.tensorboard = "plain", False
    config.slurm.signal_lead_s = 600
    directory = RunDirectory(tmp_path)
    directory.make()
    reporting = Reporting(config, directory, {"actor": 1})
    reporting.saved(1, 290)
    assert "warning" not in capsys.readouterr().out
    reporting.saved(2, 310)  # a step may be under way when the signal comes
    said = capsys.readouterr().out
    assert "warning: saving took 310 s" in said
    assert "leaves 600 s (slurm.signal_lead_s): raise it and --signal=B:USR1@SECONDS to 930 or more" in said
    reporting.saved(3, 700)
    assert "warning" not in capsys.readouterr().out


def test_a_run_that_never_gets_to_a_step_does_not_requeue_itself_for_ever(tmp_path: Path) -> None:
    file = tmp_path / "restart_guard"
    for _ in range(2):
        for _ in range(MOST_RESTARTS - 1):
            refuse_restart(file, False, 600)
        refuse_restart(file, True, 600)  # a step was done: the count begins anew
    for _ in range(MOST_RESTARTS - 1):
        refuse_restart(file, False, 600)
    with pytest.raises(ConfigError, match=rf"{MOST_RESTARTS} times in a row .*slurm.signal_lead_s = 600"):
        refuse_restart(file, False, 600)
    assert not file.exists()  # whoever submits it again starts anew


def test_a_model_that_was_never_compared_is_noted_before_anything_starts(tmp_path: Path) -> None:
    directory = llama_like(tmp_path)
    (directory / "config.json").write_text(json.dumps({"architectures": ["OtherForCausalLM"]}))
    for name, text in (("prompts.jsonl", '{"input": "1+1"}\n'), ("reward.py", "def reward_func(responses): pass\n")):
        (tmp_path / name).write_text(text)
    config = Config(run_dir=str(tmp_path / "run"))
    config.actor.model_name_or_path = str(directory)
    config.data.prompt_dataset, config.reward.remote_url = str(tmp_path / "prompts.jsonl"), str(tmp_path / "reward.py")
    config.rollout.batch_size = 1
    notes: list[str] = []
    Inputs.read(config, SimpleNamespace(note=notes.append))  # type: ignore[arg-type]
    assert [note for note in notes if "is a OtherForCausalLM, which was never compared" in note] == notes[:1]
    assert notes[0].startswith("warning: actor.model_name_or_path: ")
