"""The policy in training as a model that samples: whole on every rank, or gathered layer by layer under ZeRO-3.

Whole: a copy without hooks, whose forward passes are this rank's own, so that no rank waits for another.
Under ZeRO-3 it has parameters of its own from `allocate` to `release`; otherwise they are those in training. Layer by
layer: the forward pass of training, which is collective, so that every rank takes as many steps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from slurm_rlhf.trainer._torch import bare_copy, without_hooks
from slurm_rlhf.trainer.distributed import undisturbed
from slurm_rlhf.trainer.forward_fixes import has_fixed_frequencies
from slurm_rlhf.trainer.trainer import Trainer


class Generation:
    """Makes a model with transformers' `generate` of a policy that `trainer` trains."""

    def __init__(self, trainer: Trainer, whole: bool) -> None:
        """`whole`: gather the parameters that ZeRO-3 has cut; without ZeRO-3 they are whole anyway."""
        self._trainer = trainer
        self._module: Any = trainer.module
        self._device = trainer.world.device
        self._full = {parameter: trainer.shapes[name] for name, parameter in self._module.named_parameters()}
        self._autocast = trainer.cfg.autocast
        self.collective = trainer.sharded and not whole and trainer.world.size > 1
        """True: all ranks take part in every forward pass, so all must run equally many."""
        self.whole = whole or not trainer.sharded
        """True: each rank has all parameters while it generates."""
        self._own: dict[nn.Parameter, nn.Parameter] = {}
        """Parameter in training -> that of the copy, which is empty until `allocate`."""
        if trainer.sharded and whole:
            for parameter in self._module.parameters():
                empty = torch.empty(0, dtype=parameter.dtype, device=self._device)
                self._own[parameter] = nn.Parameter(empty, requires_grad=False)
        self.shapes: dict[str, tuple[int, ...]] = {}
        """Parameters that `weights` yields, with their shapes."""
        if self.whole:
            self.shapes = {name: tuple(self._full[one]) for name, one in self._module.model.named_parameters()}

    @functools.cached_property
    def model(self) -> Any:
        """Return the model in eval mode, a copy."""
        module = self._module
        if self.whole:
            copy = bare_copy(module, self._own).eval()
            return stepping(copy.model, copy)
        model = stepping(module.model, self._trainer.forward)
        model.training = False
        return model

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the parameters that the copy needs: under ZeRO-3 gathered, one at a time and by all ranks."""
        return self._trainer.gathered(self._module.model) if self.whole else iter(())

    @contextmanager
    def passes(self, layer: Callable[[int], None]) -> Iterator[None]:
        """Prepare for passes of `model` inside the block.

        Nothing of the training changes by it: no random number of the run is drawn, modes are restored. Where the
        policy is not whole, `layer` is called with the number of each layer before its parameters are gathered.
        """
        cast = torch.autocast(self._device.type, self._autocast, self._autocast is not None)
        with undisturbed(self._module, self._device), torch.no_grad(), cast:
            if self.whole:
                yield
                return
            self._module.eval()
            with watched_layers(self._module.model, layer):
                yield

    def allocate(self) -> None:
        """Allocate the copy's own parameters."""
        for trained, own in self._own.items():
            own.data = torch.empty(self._full[trained], dtype=own.dtype, device=self._device)

    def release(self) -> int:
        """Free the copy's own parameters: the next step of the optimizer makes them old. Returns the bytes."""
        freed = sum(own.nbytes for own in self._own.values())
        for own in self._own.values():
            own.data = torch.empty(0, dtype=own.dtype, device=self._device)
        return freed


def stepping(model: Any, step: Callable[..., Any]) -> Any:
    """Return `model`, a causal language model, with `step` in place of its forward pass.

    `generate` reads the signature of the forward pass, and takes the generation settings of the model if it gets none:
    those of the copy are empty, so tokens follow the plain logits. Models with longrope throw their cache away where a
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
def watched_layers(model: nn.Module, layer: Callable[[int], None]) -> Iterator[None]:
    """Call `layer`, inside the block, before each layer of `model`, also before its parameters are gathered."""
    lists = [part for part in model.modules() if isinstance(part, nn.ModuleList)]
    layers = max(lists, key=len, default=())

    def reached(number: int) -> Callable[..., None]:
        return lambda *_: layer(number)

    handles = [part.register_forward_pre_hook(reached(number), prepend=True) for number, part in enumerate(layers)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
