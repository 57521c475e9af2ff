"""Groups of keys of the stages that train on a data set: sft, rm, dpo."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from slurm_rlhf.config.ranges import COUNT, NOT_NEGATIVE, POSITIVE, FilePath, Range

STAGES = ("sft", "rm", "dpo")
"""Commands that train on a data set; each has a group of keys of its name."""


@dataclass(slots=True)
class StageKeys:
    dataset: FilePath = ""
    """Examples: a file or directory, as data.prompt_dataset. For sft with the columns data.input_key and
    data.output_key; for rm and dpo with data.input_key, data.chosen_key and data.rejected_key; with dpo.loss_type = kto
    data.input_key, data.output_key and data.label_key."""
    output_dir: FilePath = ""
    """Where the trained model goes."""
    learning_rate: Annotated[float, POSITIVE] = 1e-5
    """Peak learning rate of AdamW, cosine schedule."""
    batch_size: Annotated[int, COUNT] = 64
    """Examples per optimizer step, over all ranks."""
    max_epochs: Annotated[int, COUNT] = 1
    """Passes over the data."""
    max_steps: Annotated[int, NOT_NEGATIVE] = 0
    """Stop after this many optimizer steps; 0: when the epochs are over."""
    eval_dataset: FilePath = ""
    """Examples that it is not trained on, with the columns of dataset, by which the model is measured. rm normalises
    its scores by them, else by those of dataset."""
    eval_steps: Annotated[int, NOT_NEGATIVE] = 0
    """Measure every so many steps; 0: after the last only."""
    save_steps: Annotated[int, NOT_NEGATIVE] = 100
    """Steps between two checkpoints in <output_dir>.run, from which resume = auto goes on; 0: none."""


@dataclass(slots=True)
class Sft(StageKeys):
    """`slurm-rlhf sft` only."""


@dataclass(slots=True)
class Rm(StageKeys):
    """`slurm-rlhf rm` only."""


@dataclass(slots=True)
class Dpo(StageKeys):
    """`slurm-rlhf dpo` only."""

    learning_rate: Annotated[float, POSITIVE] = 5e-7
    """Peak learning rate of AdamW, cosine schedule."""
    loss_type: Literal["dpo", "ipo", "simpo", "orpo", "kto"] = "dpo"
    """dpo, ipo and kto compare with the model as it starts; simpo and orpo need no reference. kto takes no pairs, but
    answers that are called good or bad."""
    beta: Annotated[float, POSITIVE] = 0.1
    """How strongly dpo and kto hold to the reference; ipo's regularisation; simpo's scale (2 is usual); orpo's weight
    of the odds ratio."""
    label_smoothing: Annotated[float, Range(0, 0.5)] = 0.0
    """dpo and simpo: the share of pairs whose preference is wrong (conservative DPO)."""
    simpo_gamma: Annotated[float, NOT_NEGATIVE] = 0.5
    """The margin that simpo asks for."""
    desirable_weight: Annotated[float, POSITIVE] = 1.0
    """kto: weight of the good answers. Where there are few of them, raise it: the sums of the weights of good and bad
    answers should be within 1:1 and 4:3."""
    undesirable_weight: Annotated[float, POSITIVE] = 1.0
    """kto: weight of the bad answers."""
