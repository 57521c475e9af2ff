"""Computes the rewards of a model for `slurm-rlhf serve-reward DIRECTORY`, in a worker, without a process group."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from slurm_rlhf.algorithms.batching import shards
from slurm_rlhf.config.schema import Config
from slurm_rlhf.data.tokenizer import Tokenizer, encode_prompts
from slurm_rlhf.records import STOP, Experience
from slurm_rlhf.rewards.items import Item
from slurm_rlhf.trainer.frozen import RewardModel


class ServedModel:
    """Holds a reward model on the GPU, or in fp32 on the CPU."""

    def __init__(self, path: str) -> None:
        """Load the model in the directory. Raises ModelError."""
        self.config = Config()
        self.config.reward.model_name_or_path = path
        if not torch.cuda.is_available():
            self.config.ds.param_dtype = "fp32"
        self.tokenizer = Tokenizer.load(Path(path))
        self.model = RewardModel(self.config)
        print(self.model.description, flush=True)

    def answer(self, items: list[Item], step: int) -> list[float]:
        """Score each item, [N]."""
        if not items:
            return []
        tokens = [self._tokens(item) for item in items]
        lengths = np.array([len(ids) - 1 for ids in tokens], dtype=np.int32)
        ones = np.ones(len(items))
        whole = Experience(
            lengths,
            ones.astype(np.int32),
            np.concatenate(tokens).astype(np.int32),
            ones.astype(np.bool_),
            ones.astype(np.float32),
        )
        (part,) = shards(whole, 1, self.config.train.forward_tokens, self.model.layout)
        scores = np.zeros(len(items), dtype=np.float32)
        scores[part.indices] = self.model.score(part.experience, part.micro)
        found: list[Any] = scores.tolist()
        return found

    def _tokens(self, item: Item) -> list[int]:
        """Return the tokens of prompt and response: those of the item, if they are of this model's tokenizer."""
        prompt, response = item["prompt_ids"], item["response_ids"]
        if response and self.tokenizer.response_text(prompt, response) == item["response"]:
            return [*prompt, *response]
        text = encode_prompts([item["prompt"] + item["response"]], self.tokenizer, False)[0]
        return [*text, self.tokenizer.eos_token_id] if item["finish_reason"] == STOP else text
