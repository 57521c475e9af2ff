"""Batches of unlike prompts through transformers' `generate`: log-probs are those of single passes."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from plain_policy import plain_engine, sample
from random_models import make_model
from tiny_models import make_tiny, mislabel

from slurm_rlhf.config.schema import Ds
from slurm_rlhf.data.tokenizer import Tokenizer
from slurm_rlhf.engine.engine import GenerateRequest
from slurm_rlhf.engine.hf import HfEngine, different_prompts, going_on
from slurm_rlhf.records import LENGTH, STOP, Sampling, Trajectory
from slurm_rlhf.trainer._torch import bare_copy
from slurm_rlhf.trainer.generation import stepping
from slurm_rlhf.trainer.models import load_policy

# transformers imports with `generate` a library that sets a path of its own.
pytestmark = pytest.mark.usefixtures("own_environment")

LONGEST = 100
# A window shorter than the text; positions that are learned; longrope; one that vLLM has no model of.
FEW = ("mistral", "gpt2", "phi3")
MORE = ("gemma2", "bloom", "qwen3_moe", "gemma3_text", "cohere", "opt", "falcon", "gptj", "olmoe", "granite")
NOT_IN_VLLM: dict[str, dict[str, Any]] = {
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 16, "num_layers": 2}
}


def load(path: Path) -> Any:
    """The policy as it samples while it trains."""
    module = bare_copy(load_policy(path, Ds(param_dtype="fp32"), 64, max_len=LONGEST), {}).eval()
    return stepping(module.model, module)


def plain_logprobs(model: Any, one: Trajectory, temperature: float) -> Any:
    """By one forward pass over one sequence: without a cache, or anything of this package.

    Behind its end it is as long as the longest of a run, because some rotary embeddings go by the length of a text.
    """
    text = np.concatenate([one.prompt_ids, one.response_ids])
    ids = torch.from_numpy(np.pad(text, (0, LONGEST - len(text))).astype(np.int64))[None]
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0, len(one.prompt_ids) - 1 : len(text) - 1]
    logprobs = torch.log_softmax(logits / temperature, dim=-1)
    return logprobs.gather(-1, ids[0, len(one.prompt_ids) : len(text), None])[:, 0].numpy()


def requests(count: int, sampling: Sampling) -> list[GenerateRequest]:
    rng = np.random.default_rng(3)
    prompts = [rng.integers(2, 60, length).astype(np.int32) for length in (1, 30, 7, 19, 3)[:count]]
    return [GenerateRequest(str(row), row, 0, ids, sampling, 100 + row) for row, ids in enumerate(prompts)]


def engine(path: Path, policy: Any) -> HfEngine:
    return plain_engine(path, policy, version=6, number=4)


@pytest.fixture(
    scope="module",
    params=[*FEW, *NOT_IN_VLLM, *(pytest.param(name, marks=pytest.mark.full) for name in MORE)],
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp(request.param), request.param, **NOT_IN_VLLM.get(request.param, {}))


@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen2_moe", "qwen3_moe", "seed_oss"])
def test_texts_are_those_of_the_tokenizer_that_encodes_prompts(tmp_path: Path, kind: str) -> None:
    """Also for the types of models of which transformers rebuilds a byte-level tokenizer as SentencePiece."""
    from transformers import AutoTokenizer

    file = mislabel(make_tiny(tmp_path, "llama")) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": kind}))
    read = Tokenizer.load(tmp_path)
    ids = read.encode("1 + 2 =")
    assert AutoTokenizer.from_pretrained(tmp_path).decode(ids) != "1 + 2 ="
    assert [read.decode(ids), read.response_text(ids[:3], ids[3:])] == ["1 + 2 =", " 2 ="]


def test_a_batch_of_unlike_prompts_is_what_each_is_alone(model: Path) -> None:
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").eval()
    sampling = Sampling(temperature=0.7, max_new_tokens=24)
    policy, asked = load(model), requests(5, sampling)
    # A later turn of an episode has a limit of its own, and is in the batch all the same.
    asked[3] = replace(asked[3], sampling=replace(sampling, max_new_tokens=5))
    found, steps = sample(engine(model, policy), asked)
    assert steps == max(len(one.response_ids) for one in found)
    assert len(found[3].response_ids) <= 5
    assert [one.prompt for one in found] == [0, 1, 2, 3, 4]
    for one, request in zip(found, asked, strict=True):
        expected = plain_logprobs(plain, one, 0.7)
        np.testing.assert_allclose(one.rollout_logprobs, expected, atol=1e-5)
        assert one.finish_reason == (STOP if one.response_ids[-1] == 1 else LENGTH)
        alone = sample(engine(model, policy), [request])[0][0]
        assert alone.response_ids.tolist() == one.response_ids.tolist()
        assert (one.engine, one.versions[0].version) == (4, 6)


def test_prompts_are_computed_once_and_what_has_ended_no_more(model: Path) -> None:
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").eval()
    policy, sampling = load(model), Sampling(temperature=0.7, max_new_tokens=24)
    one_each = requests(4, sampling)
    asked = [replace(one, key=f"{one.key}.{n}", sample=n, seed=one.seed + n) for n in range(3) for one in one_each]
    seen: list[tuple[int, ...]] = []
    step = policy.forward

    @functools.wraps(step)
    def watched(**inputs: Any) -> Any:
        seen.append(tuple(inputs["input_ids"].shape))
        return step(**inputs)

    policy.forward = watched
    found, steps = sample(engine(model, policy), asked)
    for one in found:
        np.testing.assert_allclose(one.rollout_logprobs, plain_logprobs(plain, one, 0.7), atol=1e-5)
    assert seen == passes([len(one.response_ids) for one in found])
    assert len(seen) == steps
    for one, request in list(zip(found, asked, strict=True))[4:6]:
        alone = sample(engine(model, policy), [request])[0][0]
        assert alone.response_ids.tolist() == one.response_ids.tolist()


def passes(lengths: list[int]) -> list[tuple[int, int]]:
    """Shapes of what the model reads: four prompts, the longest of 30 tokens, then rows that go on."""
    shapes, rows = [(4, 30)], lengths
    for taken in range(1, max(lengths)):
        left = [length for length in rows if length > taken]
        rows = left if 4 * (len(rows) - len(left)) >= len(rows) else rows
        shapes.append((len(rows), 1))
    return shapes


def test_rows_go_on_until_a_quarter_of_them_has_ended() -> None:
    assert going_on([True] * 3, drops=True) == going_on([True] * 3, drops=False) == []
    assert going_on([False, True, False, False], drops=True) == [0, 2, 3]
    assert going_on([False, True, False, False], drops=False) == [0, 1, 2, 3]
    assert going_on([False] * 4 + [True], drops=True) == [0, 1, 2, 3, 4]


def test_equal_prompts_are_one() -> None:
    first, second, third = np.array([3], np.int32), np.array([3, 0], np.int32), np.array([4], np.int32)
    different, each = different_prompts([first, second, first.copy(), third, second])
    assert [prompt.tolist() for prompt in different] == [[3], [3, 0], [4]]
    assert each == [0, 1, 0, 2, 1]
