"""vLLM as a script uses it, with nothing of this package around it: what `slurm-rlhf bench rollout` compares with."""

from __future__ import annotations

from typing import Any

from slurm_rlhf.config.schema import Config
from slurm_rlhf.records import I32, Sampling
from slurm_rlhf.rollout.vllm_settings import engine_config


class BareGenerate:
    """`LLM.generate` on the same model, precision, batch width and cache size as the rollout worker's engine."""

    def __init__(self, config: Config) -> None:
        """Raises as `VllmEngine` does. `environment.prepare_environment` comes first."""
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
        """A response to each of `prompts` (token ids, [P] each), all at once; their token ids, in order."""
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
