"""The sides that a comparison has, and the models that it is asked about."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from packed_rows import make_experience
from random_models import make_model
from tiny_models import make_tiny

from slurm_rlhf.cli.main import main
from slurm_rlhf.data.tokenizer import Tokenizer
from slurm_rlhf.errors import ConfigError, ModelError
from slurm_rlhf.parity import sides
from slurm_rlhf.parity.verdicts import NEW_TOKENS, PRECISIONS, model, prompts
from slurm_rlhf.trainer import logprobs

EXPERIENCE = make_experience([(3, 9), (12, 1), (1, 30), (5, 44)])
MAX_LEN = 64
WITH_HEAD_MATH = ("gemma2", "granite", "cohere")  # a soft cap, a divisor, a factor


def apart(path: Path, precision: str) -> float:
    config = sides.settings(str(path), PRECISIONS[precision], MAX_LEN)
    one, other = sides.trained(config, EXPERIENCE), sides.plain(config, EXPERIENCE)
    assert one.shape == other.shape == EXPERIENCE.action_mask.shape
    return float(np.abs(one - other).max())


@pytest.mark.parametrize("arch", WITH_HEAD_MATH)
def test_a_formula_behind_the_head_is_applied_and_would_be_missed(
    tmp_path: Path, arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_model(tmp_path / "model", arch)
    assert apart(path, "fp32") < 1e-5
    monkeypatch.setattr("slurm_rlhf.trainer.models.head_math", lambda config, where: logprobs.PLAIN_HEAD)
    with pytest.raises(ModelError, match="are not those of its body and its output embeddings"):
        apart(path, "fp32")


@pytest.mark.parametrize("arch", WITH_HEAD_MATH)
def test_a_head_in_fp32_is_the_same_multiplication_in_both(tmp_path: Path, arch: str) -> None:
    """The bodies are in bf16; where their attention computes alike, the rest is fp32."""
    path = make_model(tmp_path / "model", arch)
    config = sides.settings(str(path), PRECISIONS["bf16+head"], MAX_LEN)
    config.ds.attn_implementation = "eager"
    wide, plain = sides.trained(config, EXPERIENCE), sides.plain(config, EXPERIENCE)
    narrow = sides.trained(sides.settings(str(path), PRECISIONS["bf16"], MAX_LEN), EXPERIENCE)
    assert np.abs(wide - plain).max() < 0.05
    assert np.abs(wide - plain).mean() < 0.8 * np.abs(narrow - plain).mean()


def test_prompts_are_of_all_lengths_and_leave_room_for_a_response(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(str(make_model(tmp_path / "model", "qwen2")))
    for max_len in (48, 320, 3000):
        lengths = [len(ids) for ids in prompts(tokenizer, max_len)]
        assert lengths[0] == 1
        assert max_len // 2 < lengths[-1] + NEW_TOKENS <= max_len
    assert len(lengths) == 6


def test_a_tokenizer_that_knows_no_letters_is_reported(tmp_path: Path) -> None:
    class Mute(Tokenizer):
        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            return [0]

    with pytest.raises(ModelError, match="its tokenizer makes 1 tokens of an English text"):
        prompts(Mute.__new__(Mute), 64)


def test_a_head_that_is_no_linear_layer_has_no_fp32_form() -> None:
    class Model:
        def get_output_embeddings(self) -> torch.nn.Module:
            return torch.nn.Identity()

    with pytest.raises(ModelError, match="x: its head is a Identity"):
        sides._widen_head(Model(), "x")


# --- subjects ---------------------------------------------------------------------------------------------------------


def test_a_model_of_the_hub_is_found_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    stored = tmp_path / "models--me--tiny"
    make_tiny(stored / "snapshots" / "1234")
    (stored / "refs").mkdir()
    (stored / "refs" / "main").write_text("1234")
    subject = model("me/tiny", 320)
    assert (subject.directory, subject.reason) == (str(stored / "snapshots" / "1234"), "")
    assert subject.architecture == "Qwen2ForCausalLM"
    other = model("me/other", 320)
    assert other.verdict == "failed"
    assert other.reason.startswith("no such directory, and the Hugging Face hub did not give")
    assert "hf download me/other --local-dir DIR" in other.reason


def test_what_cannot_be_trained_is_refused_before_anything_starts(tmp_path: Path) -> None:
    capped = make_tiny(tmp_path / "capped")
    config = json.loads((capped / "config.json").read_text())
    (capped / "config.json").write_text(json.dumps(config | {"final_logit_softcapping": 30.0}))
    subject = model(str(capped), 320)
    assert subject.verdict == "refused"
    assert "how a qwen2 does it is not known here" in subject.reason
    assert "lower --max_len to at most 512" in model(str(make_tiny(tmp_path / "short")), 600).reason
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "no config.json" in model(str(empty), 320).reason
    with pytest.raises(ConfigError, match="no such directory, and no name of a model on the Hugging Face hub"):
        model("./nowhere", 320)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "name a model\nusage: slurm-rlhf check-parity"),
        (["--precisio=fp32"], "unknown option 'precisio'; did you mean precision?"),
        (["--all"], "unknown option 'all'"),
        (["model", "--precision=fp8"], "--precision: unknown 'fp8' (valid: fp32, bf16, "),
        (["model", "--precision="], "--precision takes a value: fp32, bf16"),
        (["model", "--max_len=3"], "--max_len takes a whole number of at least 48, got '3'"),
        (["model", "--timeout", "soon"], "--timeout takes a number of at least 1, got 'soon'"),
        (["./nowhere"], "./nowhere: no such directory"),
    ],
)
def test_bad_words(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-parity", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert "Traceback" not in err


@pytest.mark.parametrize("columns", ["80", "200"])
def test_help(columns: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert main(["check-parity", "--help"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: slurm-rlhf check-parity MODEL ...")
    assert all(f"--{name} " in out for name in ("precision", "timeout", "json"))
    assert max(map(len, out.splitlines()[1:])) <= int(columns)


def test_a_refused_model_is_a_line_and_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refused, other = (make_tiny(tmp_path / name) for name in ("refused", "other"))
    for path in (refused, other):
        config = json.loads((path / "config.json").read_text()) | {"architectures": ["ApertusForCausalLM"]}
        (path / "config.json").write_text(json.dumps(config))
    assert main(["check-parity", str(refused)]) == 1
    out = capsys.readouterr().out
    assert f"{refused}: refused: " in out
    assert "with random weights its log-probs in vLLM and in transformers are" in " ".join(out.split())
    assert out.endswith("\n1 refused\n")
    assert main(["check-parity", str(refused), str(other), str(refused), "--json"]) == 1
    lines = json.loads(capsys.readouterr().out)["lines"]
    assert [line["model"] for line in lines] == [str(refused), str(other)]
