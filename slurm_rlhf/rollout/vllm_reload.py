"""New weights for a model that vLLM has already loaded, repacked and maybe captured in CUDA graphs."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from slurm_rlhf.rollout.parameters import check_loaded


@torch.no_grad()
def reload_weights(model: Any, vllm_config: Any, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Load `weights` (names of a saved model) into `model` in place; what `weights` raises goes through.

    vLLM's layerwise reload: layers go back to the form in which they are loaded, load, are processed anew, and copied
    into the tensors they had, which CUDA graphs and kernels hold on to. It keeps a layer's incoming tensors until the
    layer is complete. Raises SyncError when a parameter of `model` got nothing.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    # It warns, at every update, of each layer that nothing was sent for, tied heads and rotary tables among them. What
    # must be sent is checked where it is known, in `parameters`.
    logging.getLogger(initialize_layerwise_reload.__module__).setLevel(logging.ERROR)
    _unpack_experts(model)
    with set_current_vllm_config(vllm_config):
        initialize_layerwise_reload(model)
        try:
            loaded = model.load_weights(weights)
        finally:
            # After a failure too: layers that got nothing return to their old tensors, and the next reload can begin.
            finalize_layerwise_reload(model, vllm_config.model_config)
        _repack_tied_heads(model)
    check_loaded(model, loaded)


def _repack_tied_heads(model: Any) -> None:
    """A head that shares the embedding's weight receives none of its own, so the reload does not process it.

    On a CPU it multiplies with a repacked copy (`cpu_linear`) of the weight, which would stay the old policy's.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


def _unpack_experts(model: Any) -> None:
    """Experts are repacked, on a CPU, while their kernel is made, and their new weights only if there is none yet.

    Without this the kernel would take the new policy's plain weights for repacked ones.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None
