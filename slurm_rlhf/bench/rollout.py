"""Measure for `slurm-rlhf bench rollout`: the rollout worker and a bare `LLM.generate`, in turns."""

from __future__ import annotations

import os
import socket
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np

from slurm_rlhf.bench.compare import compare, table, with_model
from slurm_rlhf.config.schema import Config
from slurm_rlhf.engine.engine import request_seed
from slurm_rlhf.engine.vllm import engine_config
from slurm_rlhf.errors import ConfigError
from slurm_rlhf.placement.model_shape import read_shape
from slurm_rlhf.ranks.engine_leader import EngineLeader
from slurm_rlhf.ranks.rank_process import import_libraries, serve
from slurm_rlhf.ranks.worker import RankInfo
from slurm_rlhf.records import I32, Prompt, Sampling, Trajectory
from slurm_rlhf.sampling.episodes import Episodes
from slurm_rlhf.sampling.scheduler import Scheduler
from slurm_rlhf.wire.auth import RunKeys
from slurm_rlhf.wire.calls import EngineCalls
from slurm_rlhf.wire.client import ControlClient
from slurm_rlhf.wire.handles import ControlServer, EngineHandle


def run_bench(options: dict[str, Any], config: Config) -> dict[str, Any]:
    """Measure tokens/s of both sides, in each repetition with new random prompts.

    Prompts have `prompt_tokens` tokens on average. `same_tokens` in the result is the share of responses that are equal
    on both sides in the last repetition: 1 in fp32, less if rounding in another order of a batch changes a token.
    Raises ConfigError for prompts that do not fit, ModelError for a model that cannot be used, RunError.
    """
    r, prompts, prompt_tokens = config.rollout, options["prompts"], options["prompt_tokens"]
    new, longest = r.max_new_tokens, prompt_tokens + prompt_tokens // 2
    if longest + new > config.data.max_len:
        raise ConfigError(
            f"bench rollout: prompts of up to {longest} tokens and rollout.max_new_tokens = {new} are "
            f"{longest + new} tokens, more than data.max_len = {config.data.max_len}: lower one of them, or raise "
            "data.max_len"
        )
    how = Sampling(1, r.temperature, r.top_p, r.top_k, new, list(r.stop))
    answered: dict[str, list[list[int]]] = {}
    with with_model(options, config, options["mean_response"]), tempfile.TemporaryDirectory() as scratch:
        # First, because vllm reads the environment that this sets when it is imported.
        worker = _Worker(config, Path(scratch) / "keys.json")
        try:
            vocab = read_shape("actor.model_name_or_path", config.actor.model_name_or_path).vocab
            baseline = BaselineEngine(config)
            episodes = Episodes(Scheduler(worker.handle, config.train.seed, config.vllm.max_num_seqs))

            def ours(number: int) -> int:
                drawn = _prompts(number, prompts, prompt_tokens, vocab)
                found: list[Trajectory] = episodes.sample(drawn, how, number)
                answered["ours"] = [t.response_ids.tolist() for t in found]
                return sum(len(t.response_ids) for t in found)

            def plain(number: int) -> int:
                drawn = _prompts(number, prompts, prompt_tokens, vocab)
                seeds = [request_seed(config.train.seed, prompt.index, 0, number) for prompt in drawn]
                answered["bare"] = baseline.generate([prompt.token_ids for prompt in drawn], how, seeds)
                return sum(map(len, answered["bare"]))

            result = compare(ours, plain, options["repeats"])
        finally:
            worker.close()
    equal = sum(a == b for a, b in zip(answered["ours"], answered["bare"], strict=True))
    return {
        "bench": "rollout",
        **result,
        "unit": "response tokens/s",
        "prompts": prompts,
        "prompt_tokens": prompt_tokens,
        "response_tokens": sum(map(len, answered["bare"])) / prompts,
        "same_tokens": equal / prompts,
        "max_num_seqs": config.vllm.max_num_seqs,
        "threads": int(os.environ.get("OMP_NUM_THREADS", "0")),
    }


def show(result: dict[str, Any]) -> str:
    """Format the results for a terminal."""
    return (
        f"{table({'rollout': result}, 'tokens/s')}\n"
        f"{result['prompts']} prompts of {result['prompt_tokens']} tokens, {result['response_tokens']:.0f} tokens a "
        f"response, {result['max_num_seqs']} at once; {result['same_tokens']:.0%} of the responses are equal"
    )


class _Worker:
    """Run the rollout role, and a conductor that calls it by messages, in one process."""

    def __init__(self, config: Config, keys: Path) -> None:
        info = RankInfo("rollout", 0, 1, 0, socket.gethostname())
        import_libraries(config, info)
        self.server = ControlServer(RunKeys.create(keys))
        client = ControlClient(self.server.endpoint(), RunKeys.load(keys), "rollout", 0, 1)
        client.connect(config.timeout.connect)
        role = EngineLeader(config, info, client)
        self._client = client
        self._thread = threading.Thread(target=serve, args=(client, role), name="rollout", daemon=True)
        self._thread.start()
        self.handle = EngineHandle(self.server, "rollout", 1, 1, config.timeout)
        self.handle.call(0, EngineCalls.start, 1).result()

    def close(self) -> None:
        self.handle.call(0, EngineCalls.shutdown).result()
        self._thread.join()
        self._client.close()
        self.server.close()


class BaselineEngine:
    """Generate as a script does: by `LLM.generate`, with our engine's model, precision, batch size and cache size."""

    def __init__(self, config: Config) -> None:
        """Load the model, after `prepare_environment`. Raises what an engine raises."""
        from vllm import LLM

        same = engine_config(config)
        model, cache = same.model_config, same.cache_config
        self._llm = LLM(
            model=model.model,
            dtype=str(model.dtype).removeprefix("torch."),
            seed=model.seed,
            max_model_len=model.max_model_len,
            max_num_seqs=same.scheduler_config.max_num_seqs,
            tensor_parallel_size=1,
            gpu_memory_utilization=cache.gpu_memory_utilization,
            kv_cache_memory_bytes=cache.kv_cache_memory_bytes,
            enable_prefix_caching=cache.enable_prefix_caching,
            enforce_eager=model.enforce_eager,
            logprobs_mode="processed_logprobs",
            use_tqdm_on_load=False,
            enable_chunked_prefill=same.scheduler_config.enable_chunked_prefill,
        )

    def generate(self, prompts: list[I32], sampling: Sampling, seeds: list[int]) -> list[list[int]]:
        """Return the token ids of one response to each of `prompts`, token ids of shape [P]."""
        from vllm import SamplingParams

        how: list[Any] = [
            SamplingParams(
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                max_tokens=sampling.max_new_tokens,
                stop=list(sampling.stop),
                seed=seed,
                logprobs=0,
            )
            for seed in seeds
        ]
        asked: list[Any] = [{"prompt_token_ids": prompt.tolist()} for prompt in prompts]
        answers = self._llm.generate(asked, how, use_tqdm=False)
        return [list(answer.outputs[0].token_ids) for answer in answers]


def _prompts(number: int, count: int, tokens: int, vocab: int) -> list[Prompt]:
    """Make the prompts of one repetition: random tokens, so that none is in the prefix cache."""
    dice = np.random.default_rng([number, count])
    lengths = dice.integers(max(1, tokens // 2), tokens + tokens // 2 + 1, count)
    return [Prompt(i, "", dice.integers(1, vocab, length).astype(np.int32)) for i, length in enumerate(lengths)]
