"""The policy in training as a model that samples: whole on every rank, or gathered layer by layer under ZeRO-3.

Whole: a copy without hooks, whose forward passes are this rank's own, so that no rank waits for another.
Under ZeRO-3 its parameters are gathered once and kept until `release`; otherwise they are those in training. Layer by
layer: the forward pass of training, which is collective, so that every rank takes as many steps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import MethodType
from typing import Any, Protocol

import torch
from torch import nn

from slurm_rlhf.training._torch import bare_copy, without_hooks
from slurm_rlhf.training.distributed import undisturbed
from slurm_rlhf.training.forward_fixes import has_fixed_frequencies
from slurm_rlhf.training.trainer import Trainer


class Watch(Protocol):
    """Is told how far a collective step has come: all ranks wait for the one that is last."""

    def layer(self, number: int) -> None:
        """Note that layer `number`, from 0 on, is about to be gathered and to compute."""

    def stepped(self) -> None:
        """Note that the step has its logits."""


class Generation:
    """Makes a model with transformers' `generate` of a policy that `trainer` trains."""

    def __init__(self, trainer: Trainer, whole: bool) -> None:
        """`whole`: gather the parameters that ZeRO-3 has cut; without ZeRO-3 they are whole anyway."""
        self._trainer = trainer
        self._module: Any = trainer.module
        self._sharded = trainer.sharded
        self._copy: Any = None
        self._autocast = trainer.cfg.autocast
        self.collective = self._sharded and not whole and trainer.world.size > 1
        """Whether every step is one of all ranks, so that all have to take as many."""
        self.whole = whole or not self._sharded
        """Whether each rank has all parameters while it generates."""

    @contextmanager
    def model(self, watch: Watch) -> Iterator[Any]:
        """Give, inside the block, the model in eval mode. Collective where parameters are gathered.

        Nothing of the training changes by it: no random number of the run is drawn, modes are restored.
        """
        module, device = self._module, self._trainer.world.device
        with undisturbed(module, device), torch.no_grad(), self._cast(device):
            if self.whole:
                if self._copy is None:
                    copy = self._whole()
                    self._copy = stepping(copy.model, copy)
                yield self._copy
                return
            module.eval()

            def watched(**inputs: Any) -> Any:
                output = self._trainer.forward(**inputs)
                watch.stepped()
                return output

            with watched_layers(module.model, watch):
                yield stepping(module.model, watched)

    def release(self) -> None:
        """Give up gathered parameters: the next step of the optimizer makes them old."""
        if self._sharded:
            self._copy = None

    def _whole(self) -> Any:
        """Copy the policy: with the parameters in training, or with gathered ones."""
        replaced = {}
        if self._sharded:
            cut = [parameter for _, parameter in self._module.named_parameters()]
            full = (whole.clone() for _, whole in self._trainer.gathered(self._module))
            replaced = {old: nn.Parameter(new, requires_grad=False) for old, new in zip(cut, full, strict=True)}
        return bare_copy(self._module, replaced).eval()

    def _cast(self, device: torch.device) -> Any:
        return nullcontext() if self._autocast is None else torch.autocast(device.type, dtype=self._autocast)


def stepping(model: Any, step: Callable[..., Any]) -> Any:
    """Return `model`, a causal language model, with `step` in place of its forward pass.

    `generate` reads the signature of the forward, and takes settings of the directory where it is not told any: the
    copy has none, so that the distribution is that of the logits. Models with longrope throw their cache away where a
    text reaches the length at which frequencies would change; those are fixed here, and the cache stays.
    """
    from transformers import GenerationConfig, GenerationMixin

    sampler = without_hooks(model)
    sampler.generation_config = GenerationConfig()
    if has_fixed_frequencies(model):
        sampler.prepare_inputs_for_generation = MethodType(GenerationMixin.prepare_inputs_for_generation, sampler)

    @functools.wraps(model.forward)
    def forward(
        *, logits_to_keep: object = None, return_dict: object = None, labels: object = None, **inputs: Any
    ) -> Any:
        return step(**inputs)

    sampler.forward = forward
    return sampler


@contextmanager
def watched_layers(model: nn.Module, watch: Watch) -> Iterator[None]:
    """Tell `watch`, inside the block, before each layer of `model`, also before its parameters are gathered."""
    lists = [part for part in model.modules() if isinstance(part, nn.ModuleList)]
    layers = max(lists, key=len, default=())

    def told(number: int) -> Callable[..., None]:
        return lambda *_: watch.layer(number)

    handles = [layer.register_forward_pre_hook(told(number), prepend=True) for number, layer in enumerate(layers)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
