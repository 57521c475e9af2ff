"""The private parts of vLLM that load new weights and adapters, written for vllm 0.32.0.

config/vllm.py set_current_vllm_config(vllm_config)
model_executor/model_loader/reload/layerwise.py initialize_layerwise_reload(model)
model_executor/model_loader/reload/layerwise.py finalize_layerwise_reload(model, model_config)
model_executor/layers/vocab_parallel_embedding.py ParallelLMHead
model_executor/layers/vocab_parallel_embedding.py VocabParallelEmbedding.quant_method
model_executor/layers/quantization/base_config.py QuantizeMethodBase.process_weights_after_loading(self, layer)
model_executor/layers/fused_moe/fused_moe_method_base.py FusedMoEMethodBase.moe_kernel
v1/engine/llm_engine.py LLMEngine.engine_core
v1/engine/llm_engine.py LLMEngine.model_executor
v1/engine/core_client.py InprocClient.add_lora(self, lora_request)
v1/engine/core_client.py InprocClient.remove_lora(self, lora_id)
v1/executor/uniproc_executor.py UniProcExecutor.driver_worker
v1/worker/gpu_worker.py Worker.model_runner
v1/worker/lora_model_runner_mixin.py LoRAModelRunnerMixin.lora_manager
config/lora.py MaxLoRARanks
config/lora.py LoRAConfig.lora_dtype
lora/request.py LoRARequest
lora/peft_helper.py PEFTHelper
lora/lora_model.py LoRAModel.from_lora_tensors(cls, lora_model_id, tensors, peft_helper, *, device, dtype)
lora/worker_manager.py WorkerLoRAManager._load_adapter(self, lora_request)
lora/worker_manager.py WorkerLoRAManager._adapter_manager
lora/model_manager.py LoRAModelManager.supported_lora_modules
lora/model_manager.py LoRAModelManager.packed_modules_mapping
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

from slurm_rlhf.engine._vllm import platform
from slurm_rlhf.errors import SyncError

if TYPE_CHECKING:
    from torch import Tensor


def reload_weights(model: Any, config: Any, weights: Iterable[tuple[str, Tensor]]) -> set[str] | None:
    """Load `weights`, named as in a saved model, into `model` in place; errors of `weights` go through.

    vLLM's layerwise reload returns each layer to its layout for loading, loads it, processes it again, and copies the
    result into the layer's old tensors, whose addresses CUDA graphs and kernels hold. It keeps a layer's incoming
    tensors until the layer is complete. Returns the names that the model's loader reports as loaded; None: it reports
    none.
    """
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    # At every update vLLM warns of each layer that gets no weights, such as tied heads and rotary tables. `checked` and
    # `check_loaded` find the parameters that are really missing.
    logging.getLogger(initialize_layerwise_reload.__module__).setLevel(logging.ERROR)
    _unpack_experts(model)
    with torch.no_grad(), set_current_vllm_config(config):
        initialize_layerwise_reload(model)
        try:
            loaded: set[str] | None = model.load_weights(weights)
        finally:
            # After a failure too: layers that got nothing return to their old tensors, and the next reload can begin.
            finalize_layerwise_reload(model, config.model_config)
        _repack_tied_heads(model)
    return loaded


def _repack_tied_heads(model: Any) -> None:
    """Process the heads that share the embedding's weight: they get no weight of their own, so no reload does it.

    On a CPU they multiply with a repacked copy (`cpu_linear`) of the weight, which would stay the old policy's.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    if not platform().is_cpu():
        return
    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


def _unpack_experts(model: Any) -> None:
    """Drop the kernels of experts on a CPU: weights are repacked for a new kernel only.

    Otherwise the old kernel would take the new policy's plain weights for repacked ones.
    """
    if not platform().is_cpu():
        return
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


# --- adapters --------------------------------------------------------------------------------------------------------


def adapter_rank(rank: int) -> int:
    """Return the smallest of vLLM's values for `max_lora_rank` that is at least `rank`."""
    from vllm.config.lora import MaxLoRARanks

    return min(size for size in get_args(MaxLoRARanks) if size >= rank)


@dataclass(frozen=True, slots=True)
class Adapter:
    """Names the adapter that samples a whole response."""

    version: int  # policy version
    request: Any  # vLLM's name of the adapter; None: the base model


class Adapters:
    """Keeps the adapters of an engine: a response is sampled to its end with the adapter that it began with.

    vLLM reads adapters from files, and caches keys and values by their names. Here they come as tensors, and no name is
    used twice: a cache that outlived its adapter would be read as that of another policy.
    """

    def __init__(self, llm: Any, rank: int, alpha: float, targets: list[str]) -> None:
        """Watch vLLM's engine `llm`, which was started with `adapter_rank(rank)`."""
        from vllm.lora.peft_helper import PEFTHelper

        self._client = llm.engine_core
        self._manager = llm.model_executor.driver_worker.model_runner.lora_manager
        self._helper = PEFTHelper(r=rank, lora_alpha=alpha, target_modules=targets)
        self._coming: dict[int, Any] = {}  # vLLM's number of an adapter -> its tensors, which it is about to read
        self._kept: list[Adapter] = []
        self._loads = 0
        self.current = Adapter(0, None)
        self._manager._load_adapter = lambda request: self._coming.pop(request.lora_int_id)

    def unsupported(self, layers: Iterable[str]) -> list[str]:
        """Return those of `layers` (Hugging Face's names) that take no adapter in vLLM's model."""
        inner = self._manager._adapter_manager
        taken = {one for name in inner.supported_lora_modules for one in inner.packed_modules_mapping.get(name, [name])}
        return [name for name in layers if name.rpartition(".")[2] not in taken]

    def load(self, version: int, tensors: Mapping[str, Tensor], in_use: set[Adapter]) -> None:
        """Make the adapter of policy `version` the current one, and drop older ones that are not `in_use`.

        Raises SyncError if those in use leave no room: then responses are older than train.async_queue_size allows.
        """
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.request import LoRARequest

        for old in [one for one in self._kept if one not in in_use]:
            self._client.remove_lora(old.request.lora_int_id)
            self._kept.remove(old)
        if len(self._kept) == self._manager.lora_config.max_loras:
            versions = ", ".join(str(one.version) for one in self._kept)
            raise SyncError(f"policy version {version}: no room for its adapter: versions {versions} are in flight")
        self._loads += 1
        request = LoRARequest(f"policy-{version}-{self._loads}", self._loads, "sent by the actor")
        model = self._manager._adapter_manager.model
        mapper = getattr(model, "hf_to_vllm_mapper", None)
        self._coming[self._loads] = LoRAModel.from_lora_tensors(
            self._loads,
            {f"base_model.model.{name}": tensor.clone() for name, tensor in tensors.items()},
            self._helper,
            device="cpu",
            dtype=self._manager.lora_config.lora_dtype,
            weights_mapper=None if mapper is None else mapper.get_rename_mapper(),
        )
        self._client.add_lora(request)
        self.current = Adapter(version, request)
        self._kept.append(self.current)
