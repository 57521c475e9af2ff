"""Layers that torch compiles (ds.compile): the same numbers, and no graph for each length. Liger's kernels by name."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from types import MethodType, ModuleType, SimpleNamespace

import pytest
import torch
from packed_rows import make_experience
from random_models import make_model
from torch._dynamo.utils import counters

from slurm_rlhf.config.schema import Ds
from slurm_rlhf.errors import ConfigError
from slurm_rlhf.trainer._torch import bare_copy
from slurm_rlhf.trainer.batch import collate
from slurm_rlhf.trainer.forward_fixes import take_liger_kernels
from slurm_rlhf.trainer.models import PolicyModule, load_policy

BATCHES = ([(3, 9), (12, 1), (1, 30)], [(5, 44), (7, 2)], [(9, 9)], [(4, 20), (2, 2), (3, 3), (8, 1)])
"""Prompts and responses of packed rows of ever other lengths."""

pytestmark = pytest.mark.usefixtures("own_environment")


def passed(policy: PolicyModule, lens: list[tuple[int, int]]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    batch = collate(make_experience(lens), torch.device("cpu"), packed=True)
    logprobs, _ = policy(batch.input_ids, batch.action_index, batch.targets, row=batch.row)
    policy.zero_grad()
    (logprobs * torch.linspace(-1, 1, len(logprobs))).sum().backward()
    return logprobs.detach(), {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("checkpointing", "backend"),
    [
        pytest.param("off", "aot_eager", marks=pytest.mark.full),
        ("full", "aot_eager"),
        *(pytest.param(how, "inductor", marks=pytest.mark.full) for how in ("off", "full")),
    ],
)
def test_compiled_layers_compute_the_same(
    tmp_path: Path, checkpointing: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    path = make_model(tmp_path / "model", "qwen2", noisy=False)
    plain = load_policy(path, Ds(param_dtype="fp32"), 7, checkpointing, max_len=64).train()
    compiled = load_policy(path, Ds(param_dtype="fp32", compile=True), 7, checkpointing, max_len=64).train()
    torch.compiler.reset()
    counters.clear()
    graphs = []
    for lens in BATCHES:
        (expected, wanted), (found, grads) = passed(plain, lens), passed(compiled, lens)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
        for name, grad in wanted.items():
            torch.testing.assert_close(grads[name], grad, rtol=1e-4, atol=1e-5, msg=name)
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] > 0
    assert graphs[1] == graphs[-1], f"other lengths are compiled anew: {graphs}"


def test_a_copy_without_hooks_computes_with_its_own_parameters_where_a_layer_was_given_another_forward() -> None:
    layer, zeros = torch.nn.Linear(2, 2), torch.nn.Parameter(torch.zeros(2, 2))
    layer.forward = MethodType(lambda self, given: given @ self.weight, layer)  # type: ignore[method-assign]
    assert bare_copy(torch.nn.Sequential(layer), {layer.weight: zeros})(torch.ones(2)).tolist() == [0, 0]


def test_liger_takes_the_models_that_it_knows_and_leaves_the_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    def model(kind: str) -> SimpleNamespace:
        return SimpleNamespace(config=SimpleNamespace(model_type=kind))

    with pytest.raises(ConfigError, match="needs GPUs"):
        take_liger_kernels(model("qwen2"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    with pytest.raises(ConfigError, match="pip install liger-kernel"):
        take_liger_kernels(model("qwen2"))
    given: dict[str, object] = {}
    liger = ModuleType("liger_kernel.transformers")
    setattr(liger, "apply_liger_kernel_to_qwen2", given.update)  # noqa: B010
    monkeypatch.setitem(sys.modules, "liger_kernel", ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", liger)
    take_liger_kernels(taken := model("qwen2"))
    assert given == {"model": taken, "cross_entropy": False, "fused_linear_cross_entropy": False}
    with pytest.raises(ConfigError, match=r"no model of type bloom: leave the key out\. Known: qwen2"):
        take_liger_kernels(model("bloom"))
