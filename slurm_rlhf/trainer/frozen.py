"""The frozen models on one rank: reference and reward model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from slurm_rlhf.config.model_directory import read_config
from slurm_rlhf.config.roles import REFERENCE, ROLES, layout_of
from slurm_rlhf.config.schema import Config, Ref, Reward
from slurm_rlhf.records import F32, Experience
from slurm_rlhf.trainer.backends import start_sharded
from slurm_rlhf.trainer.batch import TokenBatch, collate, per_action
from slurm_rlhf.trainer.distributed import join_world, local_device
from slurm_rlhf.trainer.models import RewardModule, head_name, load_policy, load_reward
from slurm_rlhf.trainer.trainer import DTYPES, stored_as
from slurm_rlhf.trainer.ulysses import SequenceGroup, sequence_group


class Frozen:
    """Runs a module without gradients: full on every rank, or sharded over the ranks by ZeRO-3.

    Under ZeRO-3, and where ranks share rows, every forward is collective: each rank calls it equally often.
    """

    def __init__(
        self,
        config: Config,
        group: Ref | Reward,
        dtype: str,
        load: Callable[[], nn.Module],
        autocast: torch.dtype | None = None,
    ) -> None:
        """Put the module that `load` makes on the host onto the device. `dtype`: its precision, a key of DTYPES.

        `autocast`: precision in which a module with fp32 parameters computes, as the actor does at ZeRO stage 0.
        Collective under ZeRO-3 or with ds.ulysses_size above 1; needs no process group without them.
        """
        self.device = local_device()
        self.group: SequenceGroup | None = None
        self._autocast = autocast
        self._module: Any
        timeout, together = config.timeout, config.ds.ulysses_size

        def loaded() -> nn.Module:
            with torch.autocast(self.device.type, autocast, autocast is not None):
                return load()

        if group.zero_stage or together > 1:
            world = join_world(timeout.collective, timeout.connect)
            self.group = sequence_group(world, together, timeout.collective)
        if group.zero_stage == 0:
            if self.device.type == "cuda":  # else libraries open a CUDA context on GPU 0, and report its memory
                torch.cuda.set_device(self.device)
            self._module = loaded().to(self.device).requires_grad_(False).eval()
            return
        self._module = start_sharded(loaded, dtype, group.offload, timeout.collective, world)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad(), torch.autocast(self.device.type, self._autocast, self._autocast is not None):
            return self._module(*args, **kwargs)


class FrozenPolicy:
    """Computes log-probs of the reference, the actor's first policy or its teacher, in the actor's precisions."""

    def __init__(self, config: Config) -> None:
        """Load the model. Raises ModelError."""
        ds, path = stored_as(config.ds), ROLES[REFERENCE].model(config)[1]

        def load() -> nn.Module:
            return load_policy(path, ds, config.train.logprob_chunk_tokens, max_len=config.data.max_len)

        dtype = config.ds.param_dtype
        autocast = DTYPES[dtype] if ds.param_dtype != dtype else None
        self.model = Frozen(config, config.ref, ds.param_dtype, load, autocast)
        self.temperature = config.rollout.temperature
        self.layout = layout_of(config.ds, path)

    def logprobs(self, exp: Experience, micro: list[list[int]]) -> dict[str, F32]:
        """Compute {"logprobs": fp32 [A]} at the rollout temperature; micro-batches as rows of `exp`. Collective."""
        model = self.model
        return {"logprobs": per_action(exp, micro, model.device, self._forward, self.layout.packed, model.group)}

    def _forward(self, batch: TokenBatch) -> Tensor:
        logprobs, _ = self.model(batch.input_ids, batch.action_index, batch.targets, self.temperature, row=batch.row)
        return batch.whole(logprobs)


class RewardModel:
    """Scores sequences on one rank of the reward role, at the token where the model was trained to score."""

    def __init__(self, config: Config) -> None:
        """Load the model. Raises ModelError."""
        path = Path(config.reward.model_name_or_path)
        self.pad: int | None = None
        self.layout = layout_of(config.ds, str(path))

        def load() -> RewardModule:
            module = load_reward(path, config.ds, max_len=config.data.max_len)
            self.pad = module.model.config.get_text_config().pad_token_id
            return module

        self.model = Frozen(config, config.reward, config.ds.param_dtype, load)
        self.pooling, why = pooling(config.reward.pooling, head_name(path), read_config("", path))
        token = {"last": "last token", "last_not_pad": "last token that is not the padding token"}[self.pooling]
        self.description = f"reward model: a response's score is that of its {token} ({why})"

    def score(self, exp: Experience, micro: list[list[int]]) -> F32:
        """Score each sequence, fp32 [N], at the token that `pooling` says. Collective under ZeRO-3.

        Every row must be in exactly one micro-batch (rows of `exp`).
        """
        scores = np.full(len(exp), np.nan, dtype=np.float32)
        answers = []
        for rows in micro:
            part = exp.select(rows)
            ends = last_token(part, self.pad if self.pooling == "last_not_pad" else None)
            model = self.model
            batch = collate(part, model.device, packed=self.layout.packed, group=model.group, read=ends)
            answers.append(batch.whole(model(batch.input_ids, batch.action_index, row=batch.row)))
        scores[[row for rows in micro for row in rows]] = torch.cat(answers).cpu().numpy()
        return scores


def pooling(wanted: str, head: str | None, config: dict[str, Any]) -> tuple[str, str]:
    """Choose (`last` or `last_not_pad`, why) for a reward model with `head` (of REWARD_HEADS) and this config.json.

    A model scores as in its training only at the token that it was trained at. With auto that is the rule of the
    library that saved it. OpenRLHF, which leaves `value_head_prefix` in config.json, and TRL's value head take the last
    token: the end-of-sequence token if one was sampled. transformers' sequence classification takes the last token that
    is not padding. These differ where the padding token is the end-of-sequence token: there transformers takes the
    token before it. Sources: OpenRLHF, `models/model.py`; transformers, `modeling_layers.py`.
    """
    if wanted != "auto":
        return wanted, f"reward.pooling = {wanted}"
    if "value_head_prefix" in config:
        return "last", "OpenRLHF's rule: config.json has value_head_prefix"
    if head == "score":
        return "last_not_pad", "transformers' rule for score.weight"
    return "last", f"the rule of OpenRLHF and TRL for {head}.weight"


def last_token(exp: Experience, pad: int | None = None) -> NDArray[np.int64]:
    """Return the index of the last token of each sequence, from 0 on, [N]; of the last that is not `pad`, if given.

    A sequence of nothing but `pad` ends at its first token, as in transformers.
    """
    row = np.repeat(np.arange(len(exp)), exp.lengths)
    place = np.arange(len(row)) - exp.token_offsets[row]
    ends = np.zeros(len(exp), dtype=np.int64)
    np.maximum.at(ends, row, place if pad is None else place * (exp.token_ids != pad))
    return ends
