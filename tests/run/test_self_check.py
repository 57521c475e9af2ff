"""The self-check with real trainers: what each fault in them is called, and that it leaves a sound run alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import self_check_bench as bench
from lookalikes import llama_like
from tiny_models import make_tiny
from waiting import HANG_S

from slurm_rlhf.config.schema import Config, Data
from slurm_rlhf.data.prompts import PromptSet
from slurm_rlhf.data.tokenizer import Tokenizer
from slurm_rlhf.eval.verdicts import PROMPT_SHARES, warnings
from slurm_rlhf.records import Experience, Trajectory, VersionSpan, pack
from slurm_rlhf.run.self_check import PER_RANK, PromptFindings, SelfCheck, few

MARKS_OF_FIXTURES = {"found": "slow"}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("self_check")
    make_tiny(path / "qwen2")
    make_tiny(path / "opt", "opt")
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{root / 'tests' / 'support'}"}
    command = [sys.executable, bench.__file__, str(path), str(path / "found.json")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return dict(json.loads((path / "found.json").read_text()))


def test_a_sound_run_passes_with_a_line_for_each_group_of_checks(found: dict[str, Any]) -> None:
    sound = found["sound"]
    assert sound["error"] == ""
    assert [note.partition(":")[0] for note in sound["notes"]] == [
        "self-check, prompts",
        "warning",  # a quarter of the prompts was dropped
        "warning",  # the template
        "self-check, rewards",
        "self-check, actor's forward",
        "self-check, sampled tokens",
        "self-check, first update",
    ]
    figures = sound["figures"]
    assert figures["again"] == figures["eval"] == 0.0
    assert 0 < figures["alone"] < 1e-5
    assert 0 < figures["engine"] < 1e-5
    assert figures["ratio"] == pytest.approx(1.0, abs=1e-6)


def test_it_changes_neither_the_update_nor_the_random_state_nor_the_mode(found: dict[str, Any]) -> None:
    on, off = found["sound"], found["off"]
    assert off["notes"] == []
    assert off["figures"] == {}
    assert on["metrics"][0] == off["metrics"][0]
    assert on["state"] == off["state"]
    assert on["state"][0] is True


def test_a_text_that_is_not_that_of_its_tokens_ends_the_run(found: dict[str, Any]) -> None:
    error = found["garbled"]["error"]
    assert error.startswith("self-check failed (text): the reward got ")
    assert "reads another tokenizer than " in error
    assert found["garbled"]["metrics"] == []


def test_dropout_in_the_actor_ends_the_run(found: dict[str, Any]) -> None:
    error = found["dropout"]["error"]
    assert error.startswith("self-check failed (again): two forward passes of the actor over the same responses are ")
    assert "dropout or router noise is still on" in error
    assert "actor.model_name_or_path" in error
    assert found["dropout"]["figures"]["again"] > 0.1
    assert found["dropout"]["figures"]["eval"] > 0.1
    assert found["dropout"]["metrics"] == []  # nothing was trained


def test_frequencies_that_follow_the_batch_end_the_run(found: dict[str, Any]) -> None:
    error = found["batch mates"]["error"]
    assert error.startswith("self-check failed (alone): ")
    assert "rope" in error
    assert "data.max_len" in error
    figures = found["batch mates"]["figures"]
    assert figures["again"] == 0.0
    assert figures["alone"] > 0.01


def test_old_log_probs_that_are_not_the_policys_end_the_run(found: dict[str, Any]) -> None:
    error = found["old log-probs"]["error"]
    assert error.startswith("self-check failed (ratio): new and old log-probs in the first update")
    ratio = found["old log-probs"]["figures"]["ratio"]
    assert abs(ratio - 1.0) > 0.01
    assert f"mean ratio {ratio:.6g}" in error
    assert "rollout.temperature" in error
    # train.self_check_stop = 0: the log-probs of the engine, which the same fault moves away from, are a warning only.
    assert found["old log-probs"]["notes"][0].startswith("warning: step 1: the log-probs of engine and actor")


def test_an_engine_that_missed_an_update_ends_the_run_in_the_step_that_shows_it(found: dict[str, Any]) -> None:
    stale = found["stale engine"]
    assert stale["error"].startswith(
        "step 2: the log-probs of engine and actor of the tokens that the engine sampled are"
    )
    assert "beyond 10 times the bound (train.self_check_stop); its checkpoints are kept" in stale["error"]
    assert len(stale["metrics"]) == 1
    assert stale["figures"]["engine"] < 1e-5  # in the first step it had the weights


def test_with_bypass_the_engine_is_still_compared(found: dict[str, Any]) -> None:
    """In the first step by a pass for the self-check alone, later by the ratio of the first update."""
    sound = found["bypass"]
    assert sound["error"] == ""
    assert 0 < sound["figures"]["engine"] < 1e-5
    assert 0 < sound["figures"]["alone"] < 1e-5
    assert "ratio" not in sound["figures"]
    assert sound["metrics"][0]["correction/log_rho_mean"] == pytest.approx(0, abs=1e-5)
    assert 0 < sound["metrics"][0]["approx_kl"] < 1e-9
    assert found["bypass, colder engine"]["error"].startswith("self-check failed (engine): ")
    stale = found["bypass, stale engine"]
    assert len(stale["metrics"]) == 1
    assert stale["error"].startswith("step 2: the log-probs of engine and actor of the tokens that the engine sampled")


def test_old_log_probs_of_the_update_give_the_same_update_without_the_pass(found: dict[str, Any]) -> None:
    without, with_pass, off = (found[case]["metrics"][0] for case in ("update", "pass", "update, off"))
    assert without["actor_grad_norm"] == pytest.approx(with_pass["actor_grad_norm"], rel=1e-5)
    assert without["ratio"] == 1.0
    assert without["approx_kl"] == 0.0
    assert without["rollout_logprob_diff"] == pytest.approx(0, abs=1e-5)
    assert without == off


def test_old_log_probs_of_the_update_are_compared_with_a_pass_of_the_self_check_and_with_the_engine(
    found: dict[str, Any],
) -> None:
    figures = found["update"]["figures"]
    assert 0 < figures["engine"] < 1e-5
    assert 0 < figures["alone"] < 1e-5
    assert figures["ratio"] == pytest.approx(1.0, abs=1e-6)
    colder = found["update, colder"]
    assert colder["error"].startswith("self-check failed (ratio): new and old log-probs in the first update")
    assert colder["figures"]["engine"] < 1e-5
    stale = found["update, stale engine"]
    assert len(stale["metrics"]) == 1
    assert stale["error"].startswith("step 2: the log-probs of engine and actor of the tokens that the engine sampled")


def test_a_few_log_probs_that_are_no_numbers_are_left_out_and_more_end_the_run(found: dict[str, Any]) -> None:
    one = found["a NaN"]
    assert one["error"] == ""
    assert any(note.startswith("warning: step 1: 1 of ") and "NaN or infinite" in note for note in one["notes"])
    assert all(np.isfinite(value) for value in one["metrics"][0].values())
    assert found["NaNs"]["error"].startswith("self-check failed (engine): step 1: 5 of ")
    assert "vllm.dtype = fp32" in found["NaNs"]["error"]
    # In a later step a few more are a warning: train.self_check_stop times as many end the run.
    for case in ("a later NaN", "later NaNs"):
        assert found[case]["error"] == ""
        assert found[case]["notes"][0].startswith(f"warning: step 1: {bench.NOT_FINITE[case]} of ")


def test_the_weights_of_a_correction_reach_the_policy_and_not_the_critic(found: dict[str, Any]) -> None:
    without, ones, zeros = (found[case]["metrics"][0] for case in ("sound", "weights of 1", "weights of 0"))
    assert ones == without
    assert zeros["actor_grad_norm"] == 0 < without["actor_grad_norm"]
    assert zeros["critic_grad_norm"] == without["critic_grad_norm"] > 0
    assert zeros["ratio"] == without["ratio"]


def test_a_few_sequences_of_unlike_lengths_are_chosen_and_every_other_one_is_cut() -> None:
    rng = np.random.default_rng(0)
    prompts, responses = np.full(30, 5, np.int32), np.full(30, 7, np.int32)
    responses[3] = 0
    tokens = rng.integers(2, 69, int((prompts + responses).sum())).astype(np.int32)
    actions = int(responses.sum())
    column = np.arange(actions, dtype=np.float32)
    exp = Experience(
        prompts, responses, tokens, rng.random(actions) < 0.5, np.zeros(30, np.float32), {"logprobs": column}
    )
    chosen = few(exp, 2)
    assert len(chosen) == 2 * PER_RANK
    assert set(chosen.response_lens.tolist()) == {0, 4, 7}
    for start, length, row in zip(chosen.action_offsets, chosen.response_lens, range(len(chosen)), strict=False):
        first = int(chosen.columns["logprobs"][start]) if length else 21  # where in the whole batch it begins
        assert (chosen.columns["logprobs"][start : start + length] == column[first : first + length]).all()
        assert (chosen.action_mask[start : start + length] == exp.action_mask[first : first + length]).all()
        source = int(np.searchsorted(exp.action_offsets, first, side="right")) - 1 if length else 3
        whole, mine = exp.token_offsets[source], chosen.token_offsets[row]
        assert (chosen.token_ids[mine : mine + 5 + length] == tokens[whole : whole + 5 + length]).all()
    assert len(few(exp.select([0, 1, 2]), 2)) == 2


BEGIN = "{{ bos_token }}{% for m in messages %}{{ m.content }}"


@pytest.mark.parametrize(
    ("template", "text", "doubled", "unended"),
    [
        (BEGIN + "{{ eos_token }}{% endfor %}", "1+1", 0.0, False),
        (BEGIN + "{{ eos_token }}{% endfor %}", "<|begin_of_text|>1+1", 0.5, False),
        (BEGIN + "</turn>{% endfor %}", "1+1", 0.0, True),
        (BEGIN + "{{ raise_exception('one turn only') if messages|length > 1 }}{% endfor %}", "1+1", 0.0, True),
    ],
)
def test_prompts_with_two_bos_and_templates_without_eos_are_found(
    tmp_path: Path, template: str, text: str, doubled: float, unended: bool
) -> None:
    tokenizer = Tokenizer.load(llama_like(tmp_path, template=template))
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"input": row}) + "\n" for row in ("2+2", text, "3" * 50)))
    prompts = PromptSet.load(file, tokenizer, Data(apply_chat_template=True), 40)
    found = PromptFindings.of(prompts, tokenizer, Data(apply_chat_template=True))
    assert found.shares["prompts_dropped"] == pytest.approx(1 / 3)
    assert found.shares["prompts_double_bos"] == doubled
    assert bool(found.template) is unended
    assert "chat template" in found.template or not unended
    assert PromptFindings.of(prompts, tokenizer, Data()).template == ""


def test_prompts_that_hold_their_answer_and_rows_that_repeat_are_found(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(llama_like(tmp_path, template=BEGIN + "{{ eos_token }}{% endfor %}"))
    asked, answer = {"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}
    rows: list[object] = [[asked], [asked, answer], "2+2", "2+2"]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"input": row}) + "\n" for row in rows))
    data = Data(apply_chat_template=True)
    prompts = PromptSet.load(tmp_path / "prompts.jsonl", tokenizer, data, 400)
    shares = PromptFindings.of(prompts, tokenizer, data).shares
    assert (shares["prompts_answered"], shares["prompts_repeated"]) == (0.25, 0.25)
    prompts[3].row["seed"] = 1  # an environment may make another prompt of it
    assert PromptFindings.of(prompts, tokenizer, data, played=True).shares["prompts_repeated"] == 0.0
    few = warnings({"prompts_answered": 0.25, "prompts_repeated": 60 / 64}, PROMPT_SHARES)
    assert "25 % of the prompts end with a message of the assistant" in few[0]
    assert "94 % of the prompts stand in the file once more" in few[1]


@pytest.mark.parametrize("off", [0.0, 0.1])
def test_a_reference_is_the_actor_before_the_first_update(off: float) -> None:
    ids, spans = np.array([3, 4], np.int32), [VersionSpan(0, 2, 0)]
    sampled = [Trajectory(0, 0, ids, ids, np.zeros(2, np.float32), np.ones(2, np.bool_), "stop", "", spans)]
    exp = pack(sampled, [0.0])
    exp.columns["logprobs"] = exp.columns["rollout_logprobs"]
    exp.columns["ref_logprobs"] = exp.columns["logprobs"] - np.float32(off)
    check = SelfCheck(Config(), None, print, PromptFindings({}), {}, None)  # type: ignore[arg-type]
    assert [(one.check, one.passed) for one in check._agreement(sampled, exp, 0)] == [
        ("engine", True),
        ("reference", not off),
    ]
    assert [one.check for one in check._agreement(sampled, exp, 1)] == ["engine"]
