"""The reward model: one number for a whole sequence, at its last token."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from slurm_rlhf.config.schema import Config
from slurm_rlhf.records import F32, Experience
from slurm_rlhf.training.collate import collate, to_device
from slurm_rlhf.training.frozen import Frozen
from slurm_rlhf.training.models import load_reward


class RewardModel:
    """One rank of the reward role."""

    def __init__(self, config: Config) -> None:
        """Raises ModelError."""
        self.model = Frozen(config, config.reward, lambda: load_reward(config.reward.model_name_or_path, config.ds))

    def score(self, exp: Experience, micro: list[list[int]]) -> F32:
        """Scores, fp32 [N], of the state at each sequence's last token: the end-of-sequence token where one was
        sampled. Every row must be in one micro-batch (rows of `exp`). Collective under ZeRO-3.
        """
        scores = np.full(len(exp), np.nan, dtype=np.float32)
        answers = []
        for rows in micro:
            part = exp.select(rows)
            batch = collate(part, self.model.device)
            answers.append(self.model(batch.input_ids, last_token(part, batch.input_ids)))
        scores[[row for rows in micro for row in rows]] = torch.cat(answers).cpu().numpy()
        return scores


def last_token(exp: Experience, input_ids: Tensor) -> Tensor:
    """Where in the flattened `input_ids` [B, L] each sequence ends, int64 [B]."""
    lengths = to_device(exp.lengths.astype(np.int64), input_ids.device)
    return torch.arange(len(exp), device=input_ids.device) * input_ids.shape[1] + lengths - 1
