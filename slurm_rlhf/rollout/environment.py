"""The environment variables that vLLM reads while it is being imported."""

from __future__ import annotations

import os
import sys


def vllm_environment(has_gpu: bool) -> dict[str, str]:
    """name -> value; the worker sets them, never the user."""
    variables = {
        # The engine lives in the worker's process, where the worker owns the step loop and can change weights.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
    if not has_gpu:
        # Every rank would bind its threads to the first cores of the node and starve the others there.
        variables["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        # One small function, the rank of the sampled token, is compiled with g++ at the first step: 3 to 17 s.
        variables["TORCHDYNAMO_DISABLE"] = "1"
    return variables


def prepare_environment() -> None:
    """Set the variables of `vllm_environment` in this process; call it before anything imports vllm.

    A VLLM_LOGGING_LEVEL that is already set is left alone; otherwise vLLM logs warnings and errors only.
    Raises RuntimeError when vllm has been imported already, because it would not see them.
    """
    if "vllm" in sys.modules:
        raise RuntimeError("prepare_environment must run before the first import of vllm in this process")
    import torch

    os.environ.update(vllm_environment(torch.cuda.is_available()))
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
