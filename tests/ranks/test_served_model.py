"""A reward model behind HTTP: its scores are those of transformers, whoever asks and however many at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import httpx
import numpy as np
import pytest
from tiny_models import make_reward
from waiting import HANG_S
from worker_pools import listening

from slurm_rlhf.config.schema import Config
from slurm_rlhf.data.tokenizer import Tokenizer
from slurm_rlhf.records import LENGTH, STOP, Prompt, Trajectory
from slurm_rlhf.rewards.pooled import ModelServer, RemoteRewards
from slurm_rlhf.workers.pool import Code, WorkerPool

pytestmark = pytest.mark.slow
TEXTS = [("2+2=", "4"), ("12+30=", "42"), ("1+1=", "333333"), ("7+8=", "15")]


def expected(path: Path, texts: list[list[int]]) -> list[float]:
    import torch
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(path)
    with torch.no_grad():
        return [float(model(torch.tensor([ids])).logits) for ids in texts]


def test_the_scores_are_those_of_transformers(tmp_path: Path) -> None:
    path = make_reward(tmp_path / "model")
    tokenizer = Tokenizer.load(path)
    ids = [(tokenizer.encode(p), tokenizer.encode(r) + [tokenizer.eos_token_id] * (len(r) < 6)) for p, r in TEXTS]
    wanted = expected(path, [prompt + response for prompt, response in ids])
    pool = WorkerPool(Code("slurm_rlhf.ranks.model_workers", "ServedModel", {"path": str(path)}), 1, 0, HANG_S)
    server = ModelServer(("127.0.0.1", 0), pool, HANG_S, str(path), "")
    url = f"http://127.0.0.1:{server.server_address[1]}"
    config = Config()
    config.reward.remote_url = url
    with listening(server, pool), closing(RemoteRewards(config, print)) as source:
        prompts, found = [], []
        for number, ((prompt, response), (before, behind)) in enumerate(zip(TEXTS, ids, strict=True)):
            tokens, after = np.array(before, np.int32), np.array(behind, np.int32)
            reason, ones = STOP if len(response) < 6 else LENGTH, np.ones(len(after))
            prompts.append(Prompt(number, prompt, tokens, None, {"input": prompt}))
            rest = (ones.astype(np.float32), ones.astype(np.bool_), reason, response, [])
            found.append(Trajectory(number, 0, tokens, after, *rest))
        with ThreadPoolExecutor(8) as threads:  # requests that wait are joined, and each gets its own scores
            answers = [*threads.map(lambda _: source(prompts, found).rewards, range(16))]
        for answer in answers:
            np.testing.assert_allclose(answer, wanted, atol=1e-5)
        body = {"query": ["12+30=42"], "prompts": ["12+30="], "labels": [None]}
        said = httpx.post(url, json=body, timeout=HANG_S).json()  # as OpenRLHF asks: text alone
        np.testing.assert_allclose(said["rewards"], wanted[1:2], atol=1e-5)

        def asked(number: int) -> tuple[int, list[float]]:
            """Ask with others; each eighth of them for what has no tokens."""
            what = {"query": [""], "prompts": [""], "labels": [None]} if number % 8 == 5 else body
            answer = httpx.post(url, json=what, timeout=HANG_S)
            return answer.status_code, answer.json().get("rewards", [])

        with ThreadPoolExecutor(32) as threads:
            several = [*threads.map(asked, range(32))]
        assert [status for status, _ in several] == [422 if number % 8 == 5 else 200 for number in range(32)]
        np.testing.assert_allclose([rewards[0] for _, rewards in several if rewards], wanted[1], atol=1e-5)
