"""Seeds, requests in active, the environment, and the check of a weight update: without an engine."""

from __future__ import annotations

import sys
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lookalikes import llama_like

from slurm_rlhf.data.tokenizer import Tokenizer
from slurm_rlhf.engine._vllm import EngineCore, tp_executor
from slurm_rlhf.engine.engine import ActiveRequest, GenerateRequest, Meter, Status, checked, request_seed
from slurm_rlhf.engine.vllm import check_loaded, prepare_environment, vllm_environment
from slurm_rlhf.errors import SyncError
from slurm_rlhf.records import STOP, Sampling, VersionSpan

int64 = st.integers(-(2**63), 2**63 - 1)


@given(int64, int64, int64, int64)
def test_seeds_fit_signed_tensors(run: int, prompt: int, sample: int, version: int) -> None:
    assert 0 <= request_seed(run, prompt, sample, version) < 2**63


def test_seeds_are_the_same_everywhere_and_for_ever() -> None:
    assert request_seed(42, 7, 3, 11) == 6777147901179715609
    assert request_seed(-1, 0, 0, 0) == 6435194514898586231


def test_seeds_differ_in_every_part() -> None:
    seeds = {request_seed(r, p, s, v) for r in range(8) for p in range(8) for s in range(8) for v in range(8)}
    assert len(seeds) == 8**4


def request(prompt_ids: list[int], *stop: str) -> GenerateRequest:
    return GenerateRequest("a", 5, 2, np.array(prompt_ids, dtype=np.int32), Sampling(stop=list(stop)), 1)


def test_an_active_request_splits_its_span_where_the_policy_changes() -> None:
    active = ActiveRequest(request([8, 9]))
    for step, version in enumerate([3, 3, 4, 6, 6, 6]):
        active.extend([10 + step], [-0.5 * step], version)
    decoder: Any = SimpleNamespace(response_text=lambda prompt_ids, response_ids: "text")
    done = active.finish("length", decoder, engine=7)
    assert done.versions == [VersionSpan(0, 2, 3), VersionSpan(2, 3, 4), VersionSpan(3, 6, 6)]
    assert (done.prompt, done.sample, done.finish_reason, done.text, done.engine) == (5, 2, "length", "text", 7)
    assert done.prompt_ids.tolist() == [8, 9]
    assert done.response_ids.tolist() == [10, 11, 12, 13, 14, 15]
    assert done.rollout_logprobs.tolist() == [0.0, -0.5, -1.0, -1.5, -2.0, -2.5]
    assert done.action_mask.tolist() == [True] * 6
    assert (done.response_ids.dtype, done.rollout_logprobs.dtype) == (np.int32, np.float32)


def test_a_text_is_that_of_the_tokens_up_to_the_first_stop_string(tmp_path: Path) -> None:
    """vLLM's own detokenizer, which finds the stop strings, makes another text of half characters."""
    tokenizer = Tokenizer.load(llama_like(tmp_path))
    word = tokenizer.encode("ab cd ef", add_special_tokens=False)
    for tokens, stop, end in (([170, 124, *word], ["ef", "cd", "c"], "ab c"), (word, ["zz"], "ab cd ef")):
        active = ActiveRequest(request([252], *stop), tokens)
        active.logprobs = [0.0] * len(tokens)
        text = active.finish(STOP, tokenizer, 0).text
        assert text.endswith(end)
        assert tokenizer.response_text([252], tokens).startswith(text)


def test_the_environment_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    assert vllm_environment(has_gpu=True) == {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
    }
    assert vllm_environment(has_gpu=False) == {
        **vllm_environment(has_gpu=True),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "TORCHDYNAMO_DISABLE": "1",
    }
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    for name, value in {**vllm_environment(has_gpu=False), "VLLM_LOGGING_LEVEL": "WARNING"}.items():
        monkeypatch.setenv(name, value)
    prepare_environment()  # it is imported with them
    monkeypatch.delenv("VLLM_NO_USAGE_STATS")
    with pytest.raises(RuntimeError, match="before the first import of vllm"):
        prepare_environment()


def test_the_queue_of_tp_ranks_has_no_name_once_all_have_opened_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that is killed removes no name. A stub stands in for vLLM."""
    memory = SharedMemory(create=True, size=64)
    buffer = SimpleNamespace(shared_memory=memory, is_creator=True)
    group = SimpleNamespace(mq_broadcaster=SimpleNamespace(buffer=buffer))
    stubs: dict[str, dict[str, Any]] = {
        "vllm.distributed.parallel_state": {"get_tp_group": lambda: group},
        "vllm.v1.executor.uniproc_executor": {"ExecutorWithExternalLauncher": Opened},
    }
    for name, members in stubs.items():
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        vars(sys.modules[name]).update(members)
    there: list[bool] = []
    try:
        tp_executor("own", lambda: there.append(Path("/dev/shm", memory.name).exists()))()._init_executor()
        assert (there, buffer.is_creator) == ([False], False)  # gone before the engine says that it has started
    finally:
        memory.close()
        if buffer.is_creator:
            memory.unlink()


class Opened:
    """In place of vLLM's executor."""

    def _init_executor(self) -> None:
        """All ranks have opened the queue."""


def test_a_meter_counts_what_each_step_has_added() -> None:
    meter = Meter()
    for sampled, cached in ((3, 0), (5, 4)):
        meter.begin()
        meter.stepped(Status(0, 1, sampled, 0, 0.0, "", prompt_tokens=10, cached_tokens=cached), finished=1)
    load = meter.take()
    assert (load.tokens, load.responses, load.steps, load.prompt_tokens, load.cached_tokens) == (5, 2, 2, 10, 4)


def test_an_update_is_checked_as_it_streams() -> None:
    import torch

    shapes = {"a.weight": (2, 3), "b.weight": (4,), "c.bias": (1,)}
    good = [("c.bias", torch.zeros(1)), ("a.weight", torch.zeros(2, 3)), ("b.weight", torch.zeros(4))]
    assert [name for name, _ in checked(good, shapes, 1)] == ["c.bias", "a.weight", "b.weight"]
    bad = {
        "'b.weight' has shape (2, 2), the engine's has (4,)": [("b.weight", torch.zeros(2, 2))],
        "no parameter 'lm_head.weight'": [*good, ("lm_head.weight", torch.zeros(2, 3))],
        "'c.bias' was sent twice": [*good, good[0]],
        "2 of 3 parameters were not sent: b.weight, c.bias": [good[1]],
        "3 of 3 parameters were not sent": [],
    }
    for stated, weights in bad.items():
        with pytest.raises(SyncError) as caught:
            list(checked(weights, shapes, 9))
        assert stated in str(caught.value)
        assert "policy version 9" in str(caught.value)


def test_a_parameter_that_vllm_has_not_loaded_is_an_error() -> None:
    import torch

    model = torch.nn.Linear(2, 2)
    check_loaded(model, {"weight", "bias"})
    check_loaded(model, None)  # the loader reports nothing
    with pytest.raises(SyncError, match=r"vLLM's Linear .* has not loaded 1 of its own, .*: bias"):
        check_loaded(model, {"weight"})


def test_after_a_failure_all_batches_are_taken_out_whatever_they_raise() -> None:
    queue = [1, 2, 3]

    def fail(*_: object) -> None:
        queue.pop()
        raise RuntimeError("the engine is broken")

    def refuse(names: list[str]) -> None:
        raise RuntimeError(names)

    broken = SimpleNamespace(abort=refuse, _core=SimpleNamespace(batch_queue=queue), finish_batches=fail)
    EngineCore.abort_all(broken, ["a"])  # type: ignore[arg-type]
    assert queue == []
