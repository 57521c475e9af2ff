"""Define the groups of the jobs without training: `eval`, with the entries of eval.datasets, and `generate`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from slurm_rlhf.config.ranges import ANY, COUNT, NOT_NEGATIVE, FilePath, Range


@dataclass(slots=True)
class EvalDataSet:
    """Is an entry of eval.datasets; what is None is as in the group eval, columns as in the group data."""

    path: FilePath
    name: str = ""  # in metrics and reports; empty: that of the file
    n_samples_per_prompt: int | None = None
    temperature: float | None = None
    max_samples: int | None = None
    pass_k: list[int] | None = None
    pass_score: float | None = None
    answer_pattern: str | None = None
    source_key: str | None = None
    input_key: str | None = None
    label_key: str | None = None


@dataclass(slots=True)
class Eval:
    dataset: FilePath = ""
    """JSONL file of evaluation prompts; empty: no evaluation, unless eval.datasets names some."""
    datasets: list[EvalDataSet] = field(default_factory=list)
    """Several data sets: paths, or tables with path and, where they differ from the keys below, name,
    n_samples_per_prompt, temperature, max_samples, pass_k, pass_score, answer_pattern, source_key, input_key,
    label_key. A file may come twice, greedy and sampled, under two names."""
    steps: Annotated[int, NOT_NEGATIVE] = 0
    """Evaluate every so many steps; 0: before the first and after the last only."""
    temperature: Annotated[float, Range(0, 2)] = 0.0
    """0: greedy."""
    n_samples_per_prompt: Annotated[int, COUNT] = 1
    """Responses per evaluation prompt; more than one needs a temperature."""
    max_samples: Annotated[int, NOT_NEGATIVE] = 0
    """Use only the first rows of the file; 0: all."""
    pass_k: Annotated[list[int], COUNT] = field(default_factory=list)
    """The k of pass@k; empty: 1, 2, 4, ... and the samples of a prompt."""
    pass_score: Annotated[float, ANY] = 1.0
    """A response with at least this score counts as correct."""
    answer_pattern: str = ""
    """Regular expression for the answer in a response, which the majority vote compares: its last match, or the group
    of it. Empty: the whole response."""
    source_key: str = ""
    """Column that says where a prompt comes from, for a table by source; empty: none."""
    overlap: bool = False
    """Evaluate on the engines while the actor trains on the batch of the next step; needs GPUs of the engines' own."""


@dataclass(slots=True)
class Generate:
    """`slurm-rlhf generate` only."""

    model_name_or_path: FilePath = ""
    """The model that answers: a Hugging Face directory, the name of a model in the Hugging Face cache of this machine,
    a run directory (its final model, else its newest checkpoint), or a checkpoint of a run."""
    dataset: FilePath = ""
    """JSONL or Parquet (.parquet) file with the prompts in the column data.input_key."""
    max_samples: Annotated[int, NOT_NEGATIVE] = 0
    """Use only the first rows of the file; 0: all."""
    engines_per_node: Annotated[int, NOT_NEGATIVE] = 0
    """Engines on each node; 0: as many of vllm.tensor_parallel_size as its GPUs hold, one where there is no GPU."""
    logprobs: bool = False
    """Write the tokens of each response and their log-probs, too."""
    ordered: bool = False
    """When all rows are done, write them in the order of the file to merged.jsonl."""
    num_shards: Annotated[int, NOT_NEGATIVE] = 0
    """Parts of the file, one for each task of a job array; 0: as many as the array has tasks (--array=0-9)."""
