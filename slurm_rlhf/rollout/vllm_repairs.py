"""Where vLLM's own code of an architecture computes something else than transformers, which trains it."""

from __future__ import annotations


def repair(architecture: str) -> None:
    """Mend vLLM's class for `architecture` (as config.json names it) before an engine makes one of it."""
    if architecture == "BloomForCausalLM":
        _bloom()


def _bloom() -> None:
    """BLOOM's activation is the tanh form of GELU; vLLM takes the exact one, which is off by 5e-4 in log-probs."""
    from vllm.model_executor.models import bloom

    get_act_fn = bloom.get_act_fn
    bloom.get_act_fn = lambda name, **kwargs: get_act_fn("gelu_pytorch_tanh" if name == "gelu" else name, **kwargs)
