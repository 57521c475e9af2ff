"""Define the group `generate`: what `slurm-rlhf generate` has beyond the keys that it shares with training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from slurm_rlhf.config.ranges import NOT_NEGATIVE, FilePath


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
