"""Policy, value model and reward model, loaded from Hugging Face directories, and the heads of the latter two."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from slurm_rlhf.config import model_directory
from slurm_rlhf.config.roles import layout_of
from slurm_rlhf.config.schema import Ds
from slurm_rlhf.errors import ModelError
from slurm_rlhf.trainer import batch, forward_fixes
from slurm_rlhf.trainer._transformers import packed_rows_are_known, restore_buffers
from slurm_rlhf.trainer.backends import gathering, is_sharded
from slurm_rlhf.trainer.batch import PackedRow
from slurm_rlhf.trainer.distributed import local_device
from slurm_rlhf.trainer.logprobs import PLAIN_HEAD, HeadMath, LogprobHead, head_math
from slurm_rlhf.trainer.optimizer_state import Fragment
from slurm_rlhf.trainer.trainer import DTYPES

SCORE_CAP = "attn_logit_softcapping"
"""Field of a Hugging Face config: attention scores s become c * tanh(s / c) before the softmax."""

_NO_TENSORS = "its pickled weights hold more than tensors, which may be code: it is not run. Save it as safetensors"

log = logging.getLogger(__name__)


class PolicyModule(nn.Module):
    """Returns log-probs and entropies of response tokens from a causal language model, never its logits."""

    def __init__(
        self, model: Any, chunk_tokens: int, head_math: HeadMath = PLAIN_HEAD, fp32_head: bool = False
    ) -> None:
        super().__init__()
        self.model = model
        self.head = LogprobHead(model.get_output_embeddings(), chunk_tokens, head_math, fp32_head)

    def forward(
        self,
        input_ids: Tensor,
        action_index: Tensor | None = None,
        targets: Tensor | None = None,
        temperature: float = 1.0,
        entropy_grad: bool = False,
        row: PackedRow | None = None,
        **generation: Any,
    ) -> Any:
        """Return (log-probs, entropies), fp32 [A] each; arguments as in `TokenBatch` and `chunked_logprobs`.

        Without `action_index` it takes a step of transformers' `generate`, whose other arguments are `generation`: it
        returns the body's output, and in it `logits` [B, 1, V] in fp32 after the last tokens.
        """
        if action_index is None:
            output = self.model.base_model(input_ids=input_ids, **generation)
            output.logits = self.head(output.last_hidden_state[:, -1], None)[:, None]
            return output
        hidden = _action_states(self.model.base_model, input_ids, action_index, row)
        return self.head(hidden, targets, temperature, entropy_grad)


class ValueModule(nn.Module):
    """Computes the value of the state before each response token: the body of a language model, a linear head."""

    def __init__(self, model: Any, seed: int) -> None:
        super().__init__()
        self.model = model
        self.head: str | None = None  # one of `model_directory.REWARD_HEADS`, if the head was a reward model's
        hidden = model.config.get_text_config().hidden_size
        self.value_head = ValueHead(hidden)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            # Small, so that a fresh critic starts close to zero. Source: OpenRLHF, `models/model.py`.
            self.value_head.weight.normal_(0.0, 1.0 / (hidden + 1), generator=generator)

    def forward(self, input_ids: Tensor, action_index: Tensor, row: PackedRow | None = None) -> Tensor:
        """Return the values, fp32 [A]; arguments as in `TokenBatch`."""
        values: Tensor = self.value_head(_action_states(self.model, input_ids, action_index, row))
        return values


class RewardModule(nn.Module):
    """Scores texts with the body of a language model and the head of a reward model."""

    def __init__(self, model: Any, head: ValueHead) -> None:
        super().__init__()
        self.model = model
        self.head = head
        head.store_as(model.dtype)

    def forward(self, input_ids: Tensor, index: Tensor, row: PackedRow | None = None) -> Tensor:
        """Return the scores, fp32 [N], of the tokens at `index` [N] in the flattened `input_ids` of a `TokenBatch`."""
        scores: Tensor = self.head(_action_states(self.model, input_ids, index, row))
        return scores


def load_policy(
    path: str | Path, ds: Ds, chunk_tokens: int, checkpointing: str = "off", *, max_len: int = 0
) -> PolicyModule:
    """Load the causal language model in `path` onto this rank's accelerator, under the autocast of training if any.

    Raises ModelError when it cannot be used.

    `checkpointing`: as in `checkpoint_layers`. `max_len`: tokens of the longest text of the run, prompt and response
    (data.max_len), on which the frequencies of some rotary embeddings depend; 0: as many as the model has positions.
    """
    from transformers import AutoModelForCausalLM

    model = _load(AutoModelForCausalLM, Path(path), ds, checkpointing, max_len)
    module = PolicyModule(model, chunk_tokens, head_math(model.config, str(path)), ds.fp32_lm_head)
    _compare_logits(module, str(path))
    return module


def load_critic(
    path: str | Path,
    ds: Ds,
    seed: int,
    checkpointing: str = "off",
    *,
    statistics: tuple[float, float] | None = None,
    max_len: int = 0,
) -> ValueModule:
    """Load the body of the language model in `path`, with its head if it is a reward model, else with a new one.

    `statistics`: mean and std by which rewards, and so the scores of a reward model's head, are normalised.
    `max_len` and errors as in `load_policy`.
    """
    from transformers import AutoModel

    module = ValueModule(_load(AutoModel, Path(path), ds, checkpointing, max_len), seed)
    module.head = head_name(Path(path))
    if module.head:
        take_head(Path(path), module.value_head, statistics)
    module.value_head.store_as(module.model.dtype)
    return module


def load_reward(path: str | Path, ds: Ds, *, max_len: int = 0) -> RewardModule:
    """Load the reward model in `path`: the body of a language model and one of `model_directory.REWARD_HEADS`.

    `max_len` and errors as in `load_policy`.
    """
    from transformers import AutoModel

    body = _load(AutoModel, Path(path), ds, "off", max_len)
    hidden = body.config.get_text_config().hidden_size
    return RewardModule(body, load_head(Path(path), hidden))


def _compare_logits(policy: PolicyModule, path: str) -> None:
    """Raise ModelError unless the model's logits are those of its body and head, on four tokens."""
    model = policy.model
    index = torch.arange(4, device=model.device)
    ids = (index[None] + 2) % model.config.get_text_config().vocab_size
    with torch.no_grad(), gathering(policy):
        own = model(input_ids=ids, use_cache=False).logits[0]
        ours = policy.head(_action_states(model.base_model, ids, index), None)
    off = float((own.float().log_softmax(-1) - ours.log_softmax(-1)).abs().mean())
    if not off <= (1e-3 if batch.is_exact(own) else 0.1):
        raise ModelError(
            f"{path}: the logits of {type(model).__name__} are not those of its body and its output embeddings "
            f"(log-probs differ by {off:.2g} in the mean): its head has more than one linear layer, which is not known "
            "here. Use a model whose head is one linear layer."
        )


def _compare_packed(body: Any, path: str) -> None:
    """Raise ModelError unless texts are computed in one row as they are alone, whatever text is before them."""
    lengths, device = (9, 5), body.device
    bounds = torch.tensor([0, lengths[0], sum(lengths)], dtype=torch.int32, device=device)
    place = torch.cat([torch.arange(length, device=device) for length in lengths])
    row, index = PackedRow(place[None], bounds, lengths), torch.arange(sum(lengths), device=device)
    ids = (index[None] + 2) % body.config.get_text_config().vocab_size
    with torch.no_grad(), gathering(body):
        alone = torch.cat([_action_states(body, text, index[: text.shape[1]]) for text in ids.split(lengths, dim=1)])
        packed = _action_states(body, ids, index, row)
        other = _action_states(body, torch.cat([ids[:, : lengths[0]].flip(1), ids[:, lengths[0] :]], dim=1), index, row)
    scale = float(alone.float().abs().mean())
    off, seen = (
        float((a.float() - b.float()).abs().mean()) / scale
        for a, b in ((alone, packed), (packed[lengths[0] :], other[lengths[0] :]))
    )
    limits = (1e-4, 1e-5) if batch.is_exact(alone) else (0.05, 1e-4)
    if not (off <= limits[0] and seen <= limits[1]):
        raise ModelError(
            f"{path}: packed into one row its texts are not what they are alone (hidden states differ by {off:.2g}, by "
            f"{seen:.2g} next to another text, limits {limits[0]:g} and {limits[1]:g}): it has layers that carry a "
            "state from token to token, or attention of its own. Set ds.packing_samples = never."
        )


def _action_states(body: nn.Module, input_ids: Tensor, action_index: Tensor, row: PackedRow | None = None) -> Tensor:
    """Return the hidden states [A, H] of the tokens at `action_index` [A]. Collective if ranks share the row."""
    where: dict[str, Any] = {}
    if row is not None:  # with lengths on the host: a layer that has to read them from the device waits for it
        ends = {"cu_seq_lens_q": row.bounds, "cu_seq_lens_k": row.bounds}
        longest = {"max_length_q": max(row.lengths), "max_length_k": max(row.lengths)}
        where = {"position_ids": row.position_ids, batch.ROW_ARGUMENT: row, **ends, **longest}
    with packed_rows_are_known():
        states = body(input_ids=input_ids, use_cache=False, **where).last_hidden_state
    return states.flatten(0, 1).index_select(0, action_index)


def _load(kind: Any, path: Path, ds: Ds, checkpointing: str, max_len: int) -> Any:
    from transformers import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model_directory.check_model_directory("the model", str(path), tokenizer=False)
    try:
        model, info = _from_pretrained(kind, path, ds)
    except Exception as error:  # transformers, safetensors and pickle raise many kinds
        said = _NO_TENSORS if type(error).__name__ == "UnpicklingError" else error
        raise ModelError(f"{path}: transformers cannot load it as {kind.__name__}: {said}") from error
    absent = sorted(info["missing_keys"])
    if absent:
        raise ModelError(
            f"{path}: {len(absent)} weights of the architecture are not in its files and would be random, "
            f"first {', '.join(absent[:3])}. Complete the directory."
        )
    sharded = any(is_sharded(parameter) for parameter in model.parameters())
    if sharded:
        restore_buffers(model, kind)
    forward_fixes.switch_off(model)
    forward_fixes.fix_frequencies(model, max_len, str(path))
    if not sharded:
        model.to(local_device())  # some kernels know no CPU: models are compared and compiled where they train
    if layout_of(ds, str(path)).packed:
        _compare_packed(model.base_model, str(path))
    forward_fixes.checkpoint_layers(model, checkpointing)
    if ds.use_liger_kernel:
        forward_fixes.take_liger_kernels(model)
    if ds.compile:
        forward_fixes.compile_layers(model)
    return model


def _from_pretrained(kind: Any, path: Path, ds: Ds) -> Any:
    """Load (model, what its files lacked), with an attention that computes what the model's config says."""
    from transformers import AutoConfig

    def load(attention: str) -> Any:
        return kind.from_pretrained(
            path,
            dtype=DTYPES[ds.param_dtype],
            attn_implementation=attention,
            local_files_only=True,
            output_loading_info=True,
        )

    if ds.attn_implementation == "sdpa" and layout_of(ds, str(path)).packed:
        batch.register(ds.compile)
        return load(batch.ATTENTION_NAME)
    cap = getattr(AutoConfig.from_pretrained(path, local_files_only=True).get_text_config(), SCORE_CAP, None)
    if ds.attn_implementation != "sdpa":
        return load(ds.attn_implementation)
    if cap is not None:
        log.info("%s caps its attention scores (%s = %s), which sdpa ignores: attention is eager", path, SCORE_CAP, cap)
        return load("eager")
    try:
        return load("sdpa")
    except ValueError as error:
        if "attention implementation" not in str(error):
            raise
        log.info("%s has no sdpa attention in transformers: attention is eager", path)
        return load("eager")


class ValueHead(nn.Linear):
    """Computes one output in fp32 from fp32 weights, whatever the precision of the body is.

    In bf16 a value near 9 could only be a multiple of 0.06. ZeRO wants all parameters in one precision, and has fp32
    masters for those it trains: the head computes with its masters' numbers, and its parameters get the gradient.
    """

    def __init__(self, hidden: int, bias: bool = False) -> None:
        super().__init__(hidden, 1, bias=bias, dtype=torch.float32)
        self._exact: dict[str, Tensor] = {}

    def store_as(self, dtype: torch.dtype) -> None:
        """Give the parameters the precision of the body, and keep computing with the fp32 numbers that they have."""
        if dtype != torch.float32:
            self._exact = {name: parameter.detach().clone() for name, parameter in self.named_parameters()}
            self.to(dtype)

    def drop_bias(self) -> None:
        """Compute without a bias from now on."""
        self.register_parameter("bias", None)
        self._exact.pop("bias", None)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return values, fp32 [A], of hidden states [A, H]."""
        with torch.autocast(hidden.device.type, enabled=False):
            return functional.linear(hidden.float(), self.exact("weight"), self.exact("bias")).squeeze(-1)

    def exact(self, name: str) -> Any:
        """Return the fp32 numbers of `weight` or `bias` that it computes with; None without a bias."""
        parameter = getattr(self, name)
        if name not in self._exact:
            return parameter if parameter is None else parameter.float()
        exact = self._exact[name] = self._exact[name].to(parameter.device)
        rounded = parameter.float()
        return exact + (rounded - rounded.detach())  # the number of `exact`, the gradient of `parameter`

    def write_masters(self, fragments: Iterable[Fragment]) -> None:
        """Write the numbers that `store_as` has rounded into the optimizer's fp32 masters."""
        for fragment in fragments if self._exact else ():
            master = fragment.tensors["fp32"]
            exact = self._exact[fragment.name].flatten()
            master.copy_(exact[fragment.start : fragment.start + master.numel()])

    def read_masters(self, fragments: Iterable[Fragment]) -> None:
        """Compute with the masters' numbers from now on. Collective where the parameters are in less than fp32."""
        if not self._exact:
            return
        device = self.weight.device
        exact = {name: torch.zeros(numbers.shape, device=device) for name, numbers in self._exact.items()}
        for fragment in fragments:
            master = fragment.tensors["fp32"]
            exact[fragment.name].view(-1)[fragment.start : fragment.start + master.numel()] = master
        for numbers in exact.values():
            dist.all_reduce(numbers)
        self._exact = exact


def head_name(directory: Path) -> str | None:
    """Return which of REWARD_HEADS the directory has, or None. Raises ModelError if it has several."""
    names = _tensors(directory)
    found = [head for head in model_directory.REWARD_HEADS if f"{head}.weight" in names]
    if len(found) > 1:
        raise ModelError(
            f"{directory}: {' and '.join(found)} are in it, and a reward model has one head: remove the others"
        )
    return found[0] if found else None


def take_head(directory: Path, head: ValueHead, statistics: tuple[float, float] | None) -> None:
    """Copy the directory's head to `head`; with `statistics`, so that it returns (score - mean) / std.

    Raises ModelError as `load_head` does.
    """
    theirs = load_head(directory, head.in_features)
    mean, std = statistics or (0.0, 1.0)
    with torch.no_grad():
        head.weight.copy_(theirs.weight / std)
        if theirs.bias is not None or mean:
            shift = -mean if theirs.bias is None else float(theirs.bias) - mean
            head.bias = nn.Parameter(torch.full((1,), shift / std, dtype=head.weight.dtype))


def load_head(directory: Path, hidden: int) -> ValueHead:
    """Load the directory's head, fp32. Raises ModelError unless there is one and it has one output."""
    tensors = _tensors(directory)
    found = model_directory.reward_head(tensors, directory)
    weight, bias = tensors[f"{found}.weight"], tensors.get(f"{found}.bias")
    model_directory.check_head_shape(str(directory), found, list(weight.shape), hidden)
    head = ValueHead(hidden, bias=bias is not None)
    with torch.no_grad():
        head.weight.copy_(weight)
        if bias is not None:
            head.bias.copy_(bias)
    return head


def _tensors(directory: Path) -> dict[str, Tensor]:
    """Return the weights of a directory, memory-mapped: only those that are used are read from the disk."""
    found: dict[str, Tensor] = {}
    for file in model_directory.weight_files(directory):
        try:
            if file.suffix == ".safetensors":
                found |= load_file(file)
            else:
                found |= torch.load(file, map_location="cpu", mmap=True, weights_only=True)
        except (OSError, SafetensorError, RuntimeError) as error:
            raise ModelError(f"{file} cannot be read: {error}") from error
    return found
