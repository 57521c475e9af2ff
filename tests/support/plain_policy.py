"""A model of transformers as a policy that samples, with nothing of the training around it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from slurm_rlhf.data.tokenizer import Tokenizer
from slurm_rlhf.engine._transformers import parameter_shapes
from slurm_rlhf.engine.engine import GenerateRequest
from slurm_rlhf.engine.hf import HfEngine
from slurm_rlhf.records import KV_CACHE, WEIGHTS, Trajectory


def load_plain(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def expected_logprobs(model: Any, t: Trajectory, temperature: float, top_k: int = -1) -> np.ndarray:
    """The log-probs of a response by a forward of `model`."""
    ids = torch.from_numpy(np.concatenate([t.prompt_ids, t.response_ids]).astype(np.int64))[None]
    with torch.no_grad():
        logits = model(ids).logits[0, len(t.prompt_ids) - 1 : -1].double() / temperature
    if top_k > 0:
        logits[logits < logits.topk(top_k).values[:, -1:]] = -torch.inf
    return logits.log_softmax(-1).gather(1, ids[0, len(t.prompt_ids) :, None])[:, 0].numpy()


class PlainPolicy:
    """A `Policy` whose model is whole, and this process's own; it keeps its memory."""

    collective = False

    def __init__(self, model: Any) -> None:
        self.model = model
        self.shapes = parameter_shapes(model)

    @contextmanager
    def passes(self, layer: Callable[[int], None]) -> Iterator[None]:
        with torch.no_grad():
            yield

    def release(self) -> int:
        return 0

    def allocate(self) -> None: ...


def plain_engine(path: Path, model: Any, version: int = 0, number: int = 0) -> HfEngine:
    """An engine that samples with `model`, whose tokens are those of directory `path`."""
    engine = HfEngine(PlainPolicy(model), Tokenizer.load(path), torch.device("cpu"), number)
    for part in (WEIGHTS, KV_CACHE):
        engine.wake(part)
    engine.load(model.named_parameters(), version)
    return engine


def sample(engine: HfEngine, requests: list[GenerateRequest]) -> tuple[list[Trajectory], int]:
    """Responses in the order of `requests`, and the steps they took."""
    for request in requests:
        engine.add(request)
    found, steps = {}, 0
    while engine.status.unfinished:
        found |= {(one.prompt, one.sample): one for one in engine.step()}
        steps += 1
    return [found[request.prompt, request.sample] for request in requests], steps
