"""PPO's update as a script writes it with DeepSpeed and transformers: what `slurm-rlhf bench train` compares with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slurm_rlhf.config.schema import Config
from slurm_rlhf.records import Experience
from slurm_rlhf.training.deepspeed_engine import EngineConfig, Schedule, deepspeed_config
from slurm_rlhf.training.distributed import join_world
from slurm_rlhf.training.models import DTYPES


class BareTrainer:
    """A model of transformers under `deepspeed.initialize`; padded micro-batches of a fixed number of sequences."""

    def __init__(self, config: Config, micro_batch: int) -> None:
        """`micro_batch`: sequences in a micro-batch. Same optimizer, ZeRO stage and precision as `PolicyTrainer`."""
        import deepspeed
        from transformers import AutoModelForCausalLM

        self.world = join_world(config.timeout.collective)
        self.micro_batch = micro_batch
        self.clip, self.temperature = config.actor.eps_clip, config.rollout.temperature
        model: Any = AutoModelForCausalLM.from_pretrained(
            config.actor.model_name_or_path,
            dtype=DTYPES[config.ds.param_dtype],
            attn_implementation=config.ds.attn_implementation,
        )
        if config.actor.gradient_checkpointing_enable:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
        engine = EngineConfig.of(config, Schedule.of(config, config.actor.learning_rate, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=engine.schedule.peak, betas=engine.betas)
        settings = deepspeed_config(engine, sum(p.numel() for p in model.parameters()), self.world.size)
        self.engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)

    def train_step(self, exp: Experience, denominator: float) -> float:
        """One optimizer step over all sequences of `exp`, in their order; the loss."""
        total = 0.0
        starts = range(0, len(exp), self.micro_batch)
        for start in starts:
            rows = list(range(start, min(start + self.micro_batch, len(exp))))
            loss = self._loss(exp.select(rows), denominator)
            self.engine.set_gradient_accumulation_boundary(start == starts[-1])
            self.engine.backward(loss)
            total += float(loss.detach())
        self.engine.step()
        return total

    def _loss(self, part: Experience, denominator: float) -> Tensor:
        input_ids, attention, actions = (each.to(self.world.device) for each in _pad(part))
        old, advantages = (_spread(part.columns[name], actions) for name in ("logprobs", "advantages"))
        logits = self.engine(input_ids=input_ids, attention_mask=attention, use_cache=False).logits
        log_p = torch.log_softmax(logits[:, :-1].float() / self.temperature, dim=-1)
        logprobs = log_p.gather(-1, input_ids[:, 1:, None]).squeeze(-1)
        ratio = (logprobs - old).exp()
        clipped = ratio.clamp(1 - self.clip, 1 + self.clip)
        loss = -torch.minimum(ratio * advantages, clipped * advantages)
        return torch.where(actions, loss, 0).sum() / denominator


def _pad(part: Experience) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids and attention mask [B, L], and [B, L - 1] True where the next token is the policy's; to the right."""
    lengths = [int(length) for length in part.lengths]
    input_ids = torch.zeros(len(part), max(lengths), dtype=torch.int64)
    attention = torch.zeros_like(input_ids)
    actions = torch.zeros(len(part), max(lengths) - 1, dtype=torch.bool)
    for row, (start, length, prompt) in enumerate(zip(part.token_offsets, lengths, part.prompt_lens, strict=False)):
        input_ids[row, :length] = torch.from_numpy(part.token_ids[start : start + length])
        attention[row, :length] = 1
        actions[row, prompt - 1 : length - 1] = True
    return input_ids, attention, actions


def _spread(column: Any, actions: Tensor) -> Tensor:
    """A packed column as [B, L - 1], zero elsewhere."""
    spread = torch.zeros(actions.shape, dtype=torch.float32)
    spread[actions.cpu()] = torch.from_numpy(column)
    return spread.to(actions.device)
