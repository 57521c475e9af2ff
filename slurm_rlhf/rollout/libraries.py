"""vLLM and its kernels, imported ahead of their use."""

from __future__ import annotations

import contextlib


def import_vllm() -> None:
    """Import what an engine starts with. `environment.prepare_environment` comes first. No GPU is touched."""
    import vllm._custom_ops  # with its kernels
    import vllm.v1.engine.llm_engine
    from vllm.platforms import current_platform

    if current_platform.is_cuda():
        with contextlib.suppress(ImportError):  # not built for this GPU: vLLM takes another kernel and says so
            import vllm.vllm_flash_attn  # noqa: F401
