"""The reward model: one number for a whole sequence, at the token where it was trained to give it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slurm_rlhf.config.model_directory import read_config
from slurm_rlhf.config.schema import Config
from slurm_rlhf.records import F32, Experience
from slurm_rlhf.training.collate import collate, to_device
from slurm_rlhf.training.frozen import Frozen
from slurm_rlhf.training.models import RewardModule, load_reward
from slurm_rlhf.training.value_head import head_name


class RewardModel:
    """One rank of the reward role."""

    def __init__(self, config: Config) -> None:
        """Raises ModelError."""
        path = Path(config.reward.model_name_or_path)
        self.pad: int | None = None

        def load() -> RewardModule:
            module = load_reward(path, config.ds, max_len=config.data.max_len)
            self.pad = module.model.config.get_text_config().pad_token_id
            return module

        self.model = Frozen(config, config.reward, config.ds.param_dtype, load)
        self.pooling, why = pooling(config.reward.pooling, head_name(path), read_config("", path))
        token = {"last": "last token", "last_not_pad": "last token that is not the padding token"}[self.pooling]
        self.told = f"reward model: a response's score is that of its {token} ({why})"

    def score(self, exp: Experience, micro: list[list[int]]) -> F32:
        """Scores, fp32 [N], of the state at the token of each sequence that `pooling` says. Every row must be in one
        micro-batch (rows of `exp`). Collective under ZeRO-3.
        """
        scores = np.full(len(exp), np.nan, dtype=np.float32)
        answers = []
        for rows in micro:
            part = exp.select(rows)
            batch = collate(part, self.model.device)
            at = last_token(part, batch.input_ids, self.pad if self.pooling == "last_not_pad" else None)
            answers.append(self.model(batch.input_ids, at))
        scores[[row for rows in micro for row in rows]] = torch.cat(answers).cpu().numpy()
        return scores


def pooling(wanted: str, head: str | None, config: dict[str, Any]) -> tuple[str, str]:
    """(`last` or `last_not_pad`, why) for a reward model with `head` (of `value_head.HEADS`) and this config.json.

    A model answers as in its training only at the token that it was trained at. With auto that is the rule of whoever
    saved it: OpenRLHF, which leaves `value_head_prefix` in config.json, and TRL's value head take the last token, the
    end-of-sequence token if one was sampled; transformers' sequence classification takes the last one that is not
    padding. These differ where the padding token is the end-of-sequence token: there transformers takes the token
    before it. Sources: OpenRLHF, `models/model.py`; transformers, `modeling_layers.py`.
    """
    if wanted != "auto":
        return wanted, f"reward.pooling = {wanted}"
    if "value_head_prefix" in config:
        return "last", "OpenRLHF's rule: config.json has value_head_prefix"
    if head == "score":
        return "last_not_pad", "transformers' rule for score.weight"
    return "last", f"the rule of OpenRLHF and TRL for {head}.weight"


def last_token(exp: Experience, input_ids: Tensor, pad: int | None = None) -> Tensor:
    """Where in the flattened `input_ids` [B, L] each sequence ends, int64 [B]; with `pad`, its last other token.

    A sequence of nothing but `pad` ends at its first token, as transformers has it.
    """
    lengths = to_device(exp.lengths.astype(np.int64), input_ids.device)
    places = torch.arange(input_ids.shape[1], device=input_ids.device)
    counts = places < lengths[:, None]
    if pad is not None:
        counts &= input_ids != pad
    ends = (places * counts).amax(dim=1)
    return torch.arange(len(exp), device=input_ids.device) * input_ids.shape[1] + ends
