"""transformers and DeepSpeed, imported ahead of their use."""

from __future__ import annotations

from slurm_rlhf.training.distributed import local_device
from slurm_rlhf.training.zero3_init import import_deepspeed


def import_trainers(deepspeed: bool) -> None:
    """Import what a model is loaded with and, with `deepspeed`, cut and trained. No GPU is touched."""
    import transformers.modeling_utils  # noqa: F401

    if deepspeed:
        import_deepspeed(local_device())
