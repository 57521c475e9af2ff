"""What `check-parity` takes for a model, and what it answers to words that name none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_models import make_tiny

from slurm_rlhf.cli.main import main
from slurm_rlhf.errors import ConfigError
from slurm_rlhf.parity.verdicts import model


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
    assert "lower data.max_len to at most 512" in model(str(make_tiny(tmp_path / "short")), 600).reason
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
