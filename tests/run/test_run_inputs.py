"""Inputs that a run reads before it starts: how many steps its prompts are enough for, and notes on its model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from lookalikes import llama_like

from slurm_rlhf.config.schema import Config
from slurm_rlhf.data.order import PromptOrder
from slurm_rlhf.run.conductor import Inputs


def inputs_of(tmp_path: Path, rows: int) -> Config:
    directory = llama_like(tmp_path)
    (directory / "config.json").write_text(json.dumps({"architectures": ["OtherForCausalLM"]}))
    (tmp_path / "prompts.jsonl").write_text('{"input": "1+1"}\n' * rows)
    (tmp_path / "reward.py").write_text("def reward_func(responses): pass\n")
    config = Config(run_dir=str(tmp_path / "run"))
    config.actor.model_name_or_path = str(directory)
    config.data.prompt_dataset, config.reward.remote_url = str(tmp_path / "prompts.jsonl"), str(tmp_path / "reward.py")
    config.rollout.batch_size = 1
    return config


@pytest.mark.parametrize(("episodes", "most", "steps"), [(1, 0, 3), (2, 0, 6), (1, 2, 2), (1, 12, 12), (5, 7, 7)])
def test_max_steps_counts_beyond_the_episodes(tmp_path: Path, episodes: int, most: int, steps: int) -> None:
    config = inputs_of(tmp_path, 3)
    config.train.num_episodes, config.train.max_steps = episodes, most
    inputs = Inputs.read(config, print)
    inputs.close()
    assert inputs.total_steps == steps
    assert len([inputs.order.next() for _ in range(steps)]) == steps
    assert None not in [PromptOrder(3, 1, inputs.order.episodes, 0).next() for _ in range(steps)]
    assert inputs.order.total >= steps


def test_a_model_that_was_never_compared_is_noted_before_anything_starts(tmp_path: Path) -> None:
    config = inputs_of(tmp_path, 1)
    with open(config.data.prompt_dataset, "a") as file:
        file.write('{"input": "123456"}\n')
    config.data.max_len, config.rollout.max_new_tokens = 9, 5
    notes: list[str] = []
    Inputs.read(config, notes.append).close()
    assert "data.prompt_dataset: 1 prompts longer than 4 tokens were dropped" in notes
    assert [note for note in notes if "is a OtherForCausalLM, which was never compared" in note] == notes[:1]
    assert notes[0].startswith("warning: actor.model_name_or_path: ")
