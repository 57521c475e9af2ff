"""What transformers says of given tokens, by itself: the measure for the log-probs of engines and trainers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from slurm_rlhf.records import F32, I32


def hf_logprobs(model: Any, prompt_ids: I32, response_ids: I32, temperature: float = 1.0) -> F32:
    """Compute the log-probs of the response, fp32 [R], of softmax(logits / temperature).

    `model`: a causal language model of transformers, in eval mode; prompt [P] and response [R] have a token at least.
    One forward pass over one sequence, without a cache, padding or anything of this package.
    """
    ids = torch.from_numpy(np.concatenate([prompt_ids, response_ids]).astype(np.int64))[None].to(model.device)
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt_ids) - 1 : -1].float()
    logprobs = torch.log_softmax(logits / temperature, dim=-1)
    chosen = ids[0, len(prompt_ids) :, None]
    found: F32 = logprobs.gather(-1, chosen)[:, 0].cpu().numpy()
    return found
