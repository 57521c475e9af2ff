"""Policy and value model: Hugging Face directories as modules that answer one number per response token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from slurm_rlhf.config.schema import Ds
from slurm_rlhf.errors import ModelError
from slurm_rlhf.training.logprobs import LogprobHead
from slurm_rlhf.training.parameters import is_sharded
from slurm_rlhf.training.rows import rows_are_sequences
from slurm_rlhf.training.sharded import restore_buffers
from slurm_rlhf.training.value_head import head_name, load_head, take_head

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
# Fields of a Hugging Face config by which a model changes its logits after the head, which `PolicyModule` does not do.
HEAD_MATH = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")


class PolicyModule(nn.Module):
    """A causal language model that returns log-probs and entropies of response tokens, never its logits."""

    def __init__(self, model: Any, chunk_tokens: int) -> None:
        super().__init__()
        self.model = model
        self.head = LogprobHead(model.get_output_embeddings(), chunk_tokens)

    def forward(
        self,
        input_ids: Tensor,
        action_index: Tensor,
        targets: Tensor,
        temperature: float = 1.0,
        entropy_grad: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """(log-probs, entropies), fp32 [A] each; arguments as in `collate.TokenBatch` and `chunked_logprobs`."""
        hidden = _action_states(self.model.base_model, input_ids, action_index)
        answer: tuple[Tensor, Tensor] = self.head(hidden, targets, temperature, entropy_grad)
        return answer


class ValueModule(nn.Module):
    """A language model's body with a linear head: the value of the state before each response token."""

    def __init__(self, model: Any, seed: int) -> None:
        super().__init__()
        self.model = model
        self.head: str | None = None  # of `value_head.HEADS`, where the head is a reward model's
        hidden = model.config.get_text_config().hidden_size
        self.value_head = nn.Linear(hidden, 1, bias=False, dtype=model.dtype)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            # Small, so that a fresh critic starts close to zero. Source: OpenRLHF, `models/model.py`.
            self.value_head.weight.normal_(0.0, 1.0 / (hidden + 1), generator=generator)

    def forward(self, input_ids: Tensor, action_index: Tensor) -> Tensor:
        """Values, fp32 [A]; arguments as in `collate.TokenBatch`."""
        hidden = _action_states(self.model, input_ids, action_index)
        values: Tensor = self.value_head(hidden).squeeze(-1).float()
        return values


class RewardModule(nn.Module):
    """A language model's body with the head of a reward model."""

    def __init__(self, model: Any, head: nn.Linear) -> None:
        super().__init__()
        self.model = model
        self.head = head

    def forward(self, input_ids: Tensor, index: Tensor) -> Tensor:
        """Scores, fp32 [B], of the tokens at `index` [B] into the flattened `input_ids` [B, L]."""
        scores: Tensor = self.head(_action_states(self.model, input_ids, index)).squeeze(-1).float()
        return scores


def load_policy(path: str | Path, ds: Ds, chunk_tokens: int, gradient_checkpointing: bool = False) -> PolicyModule:
    """The causal language model in directory `path`. Raises ModelError when it cannot be used."""
    from transformers import AutoModelForCausalLM

    model = _load(AutoModelForCausalLM, Path(path), ds, gradient_checkpointing)
    for name in HEAD_MATH:
        value = getattr(model.config, name, None)
        if value is not None and value != 1.0:
            raise ModelError(
                f"{path}: config.json has {name} = {value}. Log-probs are computed from the plain output of the LM "
                f"head and would be wrong for it; use a model without {name}."
            )
    return PolicyModule(model, chunk_tokens)


def load_critic(
    path: str | Path,
    ds: Ds,
    seed: int,
    gradient_checkpointing: bool = False,
    *,
    statistics: tuple[float, float] | None = None,
) -> ValueModule:
    """The body of the language model in `path` under its own head if it is a reward model, else under a new one.

    `statistics`: mean and std by which rewards are normalised, and with them what a reward model's head answers.
    Raises as `load_policy`.
    """
    from transformers import AutoModel

    module = ValueModule(_load(AutoModel, Path(path), ds, gradient_checkpointing), seed)
    module.head = head_name(Path(path))
    if module.head:
        take_head(Path(path), module.value_head, statistics)
    return module


def load_reward(path: str | Path, ds: Ds) -> RewardModule:
    """The reward model in `path`: the body of a language model and one of `value_head.HEADS`. Raises ModelError."""
    from transformers import AutoModel

    body = _load(AutoModel, Path(path), ds, gradient_checkpointing=False)
    hidden = body.config.get_text_config().hidden_size
    return RewardModule(body, load_head(Path(path), hidden, DTYPES[ds.param_dtype]))


def _action_states(body: nn.Module, input_ids: Tensor, action_index: Tensor) -> Tensor:
    """Hidden states [A, H] of the tokens that `action_index` [A] points at."""
    with rows_are_sequences():
        states = body(input_ids=input_ids, use_cache=False).last_hidden_state
    return states.flatten(0, 1).index_select(0, action_index)


def _load(kind: Any, path: Path, ds: Ds, gradient_checkpointing: bool) -> Any:
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    _check_directory(path)
    try:
        model, info = kind.from_pretrained(
            path,
            dtype=DTYPES[ds.param_dtype],
            attn_implementation=ds.attn_implementation,
            local_files_only=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
        raise ModelError(f"{path}: transformers cannot load it as {kind.__name__}: {error}") from error
    absent = sorted(info["missing_keys"])
    if absent:
        raise ModelError(
            f"{path}: {len(absent)} weights of the architecture are not in its files and would be random, "
            f"first {', '.join(absent[:3])}. Complete the directory."
        )
    if any(is_sharded(parameter) for parameter in model.parameters()):
        restore_buffers(model, _on_no_device(kind, model.config))
    _without_dropout(model)
    if gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()  # Hugging Face recomputes activations in train mode only


def _on_no_device(kind: Any, config: Any) -> Any:
    """The model without memory for its parameters, built as if nobody had ever heard of ZeRO-3."""
    from transformers.integrations import deepspeed as integration

    told = integration._hf_deepspeed_config_weak_ref
    integration.unset_hf_deepspeed_config()
    try:
        with torch.device("meta"):
            return kind.from_config(config, dtype=config.dtype)
    finally:
        integration._hf_deepspeed_config_weak_ref = told


def _check_directory(path: Path) -> None:
    if not path.is_dir():
        raise ModelError(f"{path}: no such directory. Give the directory of a Hugging Face model.")
    if not (path / "config.json").is_file():
        raise ModelError(f"{path}: no config.json in it. Give the directory of a Hugging Face model.")
    if not any(True for pattern in ("*.safetensors", "pytorch_model*.bin") for _ in path.glob(pattern)):
        raise ModelError(f"{path}: no weights in it. Expected model.safetensors, its shards, or pytorch_model.bin.")


def _without_dropout(model: nn.Module) -> None:
    """The old and the new policy must differ by their weights alone."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0
