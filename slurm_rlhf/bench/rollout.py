"""The rollout worker against a bare `LLM.generate`: same prompts, same seeds, same process, in turns."""

from __future__ import annotations

import os
import socket
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np

from slurm_rlhf.bench.baseline_rollout import BareGenerate
from slurm_rlhf.bench.compare import race
from slurm_rlhf.config.schema import Config
from slurm_rlhf.control.auth import RunKeys
from slurm_rlhf.control.calls import EngineCalls, StartRequest
from slurm_rlhf.control.client import ControlClient
from slurm_rlhf.control.handles import EngineHandle
from slurm_rlhf.control.server import ControlServer
from slurm_rlhf.controller.dispatch import Generation
from slurm_rlhf.records import Prompt, Sampling, Trajectory
from slurm_rlhf.rollout.seeds import request_seed
from slurm_rlhf.workers.engine_leader import EngineLeader
from slurm_rlhf.workers.main import import_libraries, serve
from slurm_rlhf.workers.worker import RankInfo


class _Worker:
    """A conductor's end and the rollout role that answers it over the control plane, in one process."""

    def __init__(self, config: Config, keys: Path) -> None:
        info = RankInfo("rollout", 0, 1, 0, socket.gethostname())
        import_libraries(config, info)
        self.server = ControlServer(RunKeys.create(keys))
        client = ControlClient(self.server.endpoint(), RunKeys.load(keys), "rollout", 0, 1)
        client.connect(config.timeout.connect)
        role = EngineLeader(config, info, client)
        self._client = client
        self._thread = threading.Thread(target=serve, args=(client, role, None), name="rollout", daemon=True)
        self._thread.start()
        self.handle = EngineHandle(self.server, "rollout", 1, 1, config.timeout)
        self.handle.call(0, EngineCalls.start, StartRequest(total_steps=1)).result()

    def close(self) -> None:
        self.handle.call(0, EngineCalls.shutdown).result()
        self._thread.join()
        self._client.close()
        self.server.close()


def bench_rollout(config: Config, prompts: int, prompt_tokens: int, repeats: int) -> dict[str, Any]:
    """Tokens/s of both sides over `repeats` repetitions, each with `prompts` new random prompts.

    Prompts have `prompt_tokens` tokens on average, half to one and a half times as many. `same_tokens` in the answer is
    the share of responses that are equal on both sides in the last repetition: 1 in fp32, less where the other order
    of a batch decides a token. Raises ModelError for a model that cannot be used, RunError for a prompt that does not
    fit.
    """
    r = config.rollout
    how = Sampling(1, r.temperature, r.top_p, r.top_k, r.max_new_tokens, list(r.stop))
    answered: dict[str, list[list[int]]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        # Before anything else imports vllm, which reads the environment that a rank sets.
        worker = _Worker(config, Path(scratch) / "keys.json")
        try:
            vocab = _vocab(config)
            bare = BareGenerate(config)
            generation = Generation(worker.handle, config.train.seed, config.vllm.max_num_seqs, deterministic=False)

            def ours(number: int) -> int:
                drawn = _prompts(number, prompts, prompt_tokens, vocab)
                found: list[Trajectory] = generation.run(drawn, how, number)
                answered["ours"] = [t.response_ids.tolist() for t in found]
                return sum(len(t.response_ids) for t in found)

            def plain(number: int) -> int:
                drawn = _prompts(number, prompts, prompt_tokens, vocab)
                seeds = [request_seed(config.train.seed, prompt.index, 0, number) for prompt in drawn]
                answered["bare"] = bare.generate([prompt.token_ids for prompt in drawn], how, seeds)
                return sum(map(len, answered["bare"]))

            result = race(ours, plain, repeats)
        finally:
            worker.close()
    equal = sum(a == b for a, b in zip(answered["ours"], answered["bare"], strict=True))
    return {
        "bench": "rollout",
        **result.to_json(),
        "unit": "response tokens/s",
        "prompts": prompts,
        "prompt_tokens": prompt_tokens,
        "response_tokens": sum(map(len, answered["bare"])) / prompts,
        "same_tokens": equal / prompts,
        "max_num_seqs": config.vllm.max_num_seqs,
        "threads": int(os.environ.get("OMP_NUM_THREADS", "0")),
    }


def _prompts(number: int, count: int, tokens: int, vocab: int) -> list[Prompt]:
    """The prompts of one repetition: random tokens, so that nothing of them is in the prefix cache."""
    dice = np.random.default_rng([number, count])
    lengths = dice.integers(max(1, tokens // 2), tokens + tokens // 2 + 1, count)
    return [Prompt(i, "", dice.integers(1, vocab, length).astype(np.int32)) for i, length in enumerate(lengths)]


def _vocab(config: Config) -> int:
    from slurm_rlhf.rollout.parameters import parameter_shapes
    from slurm_rlhf.rollout.saved_names import skeleton

    return max(
        shape[0] for shape in parameter_shapes(skeleton(config.actor.model_name_or_path)).values() if len(shape) == 2
    )
