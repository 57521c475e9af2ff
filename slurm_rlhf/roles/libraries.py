"""The heavy libraries of a role, imported before anybody listens for a rank's heartbeats.

Opening a library of gigabytes on a file system that many nodes read at once takes minutes, and the interpreter's lock
is held all the while: no heartbeat would leave, and the rank would count as lost.
"""

from __future__ import annotations

import contextlib

from slurm_rlhf.config.schema import Config
from slurm_rlhf.roles.role import Seat


def import_libraries(config: Config, seat: Seat) -> None:
    """Import what the role of `seat` works with. No device is touched; engines see their own GPUs only from now on."""
    if seat.role == "rollout":
        _import_vllm(config, seat)
        return
    import transformers.modeling_utils  # noqa: F401

    stage = {"reference": config.ref.zero_stage, "reward": config.reward.zero_stage}
    if stage.get(seat.role, 3) == 3:  # a frozen model that is whole does without
        from slurm_rlhf.training.distributed import local_device
        from slurm_rlhf.training.sharded import import_deepspeed

        import_deepspeed(local_device())


def _import_vllm(config: Config, seat: Seat) -> None:
    from slurm_rlhf.roles.engine_rank import prepare_process

    prepare_process(config, seat)
    import vllm._custom_ops  # with its kernels
    import vllm.v1.engine.llm_engine
    from vllm.platforms import current_platform

    if current_platform.is_cuda():
        with contextlib.suppress(ImportError):  # not built for this GPU: vLLM takes another kernel and says so
            import vllm.vllm_flash_attn  # noqa: F401
