"""Compute the log-probs of the same tokens in three ways: by the engine that samples them, trainer, transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from slurm_rlhf.algorithms.batching import shards
from slurm_rlhf.config.roles import layout_of
from slurm_rlhf.config.schema import Config
from slurm_rlhf.data.tokenizer import Tokenizer
from slurm_rlhf.engine.engine import GenerateRequest, backend, request_seed
from slurm_rlhf.errors import ModelError
from slurm_rlhf.parity.verdicts import NEW_TOKENS, SAMPLES, TEMPERATURE, Precision, prompts
from slurm_rlhf.records import F32, Experience, Sampling, Trajectory, pack
from slurm_rlhf.trainer.batch import TokenBatch, per_action
from slurm_rlhf.trainer.distributed import local_device
from slurm_rlhf.trainer.models import load_policy
from slurm_rlhf.trainer.trainer import DTYPES


def settings(directory: str, precision: Precision, max_len: int) -> Config:
    """Make the configuration with which engine and trainer load the model."""
    config = Config()
    config.actor.model_name_or_path = directory
    config.ds.param_dtype = precision.dtype
    config.ds.fp32_lm_head = precision.fp32_head
    config.data.max_len = max_len
    config.vllm.max_num_seqs = 64
    return config


def sample(config: Config) -> Experience:
    """Have the engine sample responses to all prompts at once; its log-probs are in the column `rollout_logprobs`.

    Raises ModelError.
    """
    engine = backend(config).make_engine(config, 0)
    sampling = Sampling(max_new_tokens=NEW_TOKENS, temperature=TEMPERATURE)
    tokenizer = Tokenizer.load(config.actor.model_name_or_path)
    for number, ids in enumerate(prompts(tokenizer, config.data.max_len)):
        for again in range(SAMPLES):
            seed = request_seed(config.train.seed, number, again, 0)
            engine.add(GenerateRequest(f"{number}.{again}", number, again, ids, sampling, seed))
    done: list[Trajectory] = []
    while engine.status.unfinished:
        done += engine.step()
    return pack(sorted(done, key=lambda t: (t.prompt, t.sample)), [0.0] * len(done))


def trained(config: Config, exp: Experience) -> F32:
    """Compute the log-probs as training does, [A]: in train mode, in micro-batches of several sequences."""
    policy = load_policy(
        config.actor.model_name_or_path, config.ds, config.train.logprob_chunk_tokens, max_len=config.data.max_len
    ).to(local_device())

    def answer(batch: TokenBatch) -> torch.Tensor:
        logprobs: torch.Tensor = policy(batch.input_ids, batch.action_index, batch.targets, TEMPERATURE, row=batch.row)[
            0
        ]
        return logprobs

    layout = layout_of(config.ds, config.actor.model_name_or_path)
    (shard,) = shards(exp, 1, 4 * config.data.max_len, layout)
    column = per_action(shard.experience, shard.micro, local_device(), answer, layout.packed)
    order = np.argsort(np.array(shard.indices))
    offsets = shard.experience.action_offsets
    return np.concatenate([column[offsets[row] : offsets[row + 1]] for row in order])


def plain(config: Config, exp: Experience) -> F32:
    """Compute the log-probs from the logits of transformers' own model, row by row, [A]: eval mode, eager attention.

    Rows are padded at their end to data.max_len, for which an engine scales rotary embeddings: in some models these
    depend on the length of the row.
    """
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(
        config.actor.model_name_or_path,
        attn_implementation="eager",
        dtype=DTYPES[config.ds.param_dtype],
        local_files_only=True,
    )
    model = model.to(local_device()).eval()
    if config.ds.fp32_lm_head:
        _widen_head(model, config.actor.model_name_or_path)
    found = []
    for index in range(len(exp)):
        row = exp.select([index])
        prompt, length = int(row.prompt_lens[0]), int(row.lengths[0])
        ids = torch.full((1, config.data.max_len), int(row.token_ids[-1]))
        ids[0, :length] = torch.from_numpy(row.token_ids.astype(np.int64))
        ids = ids.to(local_device())
        at = torch.arange(prompt, length, device=ids.device)
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits[0, at - 1].double() / TEMPERATURE
        found.append(logits.log_softmax(-1)[torch.arange(len(at), device=ids.device), ids[0, at]])
    return torch.cat(found).float().cpu().numpy()


def _widen_head(model: Any, where: str) -> None:
    """Replace the head of the model by one that multiplies in fp32, so that all after it is in fp32."""
    head = model.get_output_embeddings()
    if not isinstance(head, torch.nn.Linear):
        raise ModelError(f"{where}: its head is a {type(head).__name__}; only a linear layer has an fp32 form")
    wide = torch.nn.Linear(head.in_features, head.out_features, head.bias is not None, device=head.weight.device)
    with torch.no_grad():
        wide.weight.copy_(head.weight)
        if head.bias is not None:
            wide.bias.copy_(head.bias)
    wide.register_forward_pre_hook(lambda _, given: (given[0].float(),))
    model.set_output_embeddings(wide)
