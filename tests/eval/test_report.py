"""The report of an evaluation: figures, tables, failures of its responses, and the files that keep them."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from slurm_rlhf.config.evaluation import EvalSettings
from slurm_rlhf.eval.report import LOOKED_AT, ScoredResponse, one_line, overall, report_of, report_text, spread
from slurm_rlhf.eval.sets import answer_of, write_responses

SETTINGS = EvalSettings("sums", "/d/sums.jsonl", 4, 0.7, 0, (1, 2, 4), 1.0, "", "source", "input", "label", True)


def response(index: int, sample: int, score: float, **other: object) -> ScoredResponse:
    made = ScoredResponse(
        dataset="sums",
        index=index,
        sample=sample,
        source="small" if index % 2 else "large",
        prompt=f"{index}+1=",
        response=f"{index + 1}" if score else "no idea",
        label=str(index + 1),
        answer=f"{index + 1}" if score else "no idea",
        score=score,
        reward=score - 0.5,
        prompt_tokens=3 + index,
        response_tokens=1 + 5 * sample,
        finish_reason="stop" if sample else "length",
    )
    return replace(made, **other)  # type: ignore[arg-type]


def responses() -> list[ScoredResponse]:
    """10 prompts, 4 samples each: prompt i has min(i, 4) correct ones, prompt 0 none."""
    return [response(index, sample, float(sample < index)) for index in range(10) for sample in range(4)]


def test_the_figures_of_a_data_set() -> None:
    found = report_of(SETTINGS, responses(), 1)
    assert found.whole.mean.value == pytest.approx((0 + 1 + 2 + 3 + 6 * 4) / 40)
    assert (found.whole.prompts, found.whole.responses, found.failed, found.errors) == (10, 40, 1, 0)
    assert found.pass_at[1].value == pytest.approx(found.whole.mean.value)
    # Pairs with a right answer: none of prompt 0, 3 of 6 of prompt 1, 5 of 6 of prompt 2, all of the others.
    assert found.pass_at[2].value == pytest.approx((0 + 3 / 6 + 5 / 6 + 7) / 10)
    assert found.pass_at[4].value == pytest.approx(9 / 10)
    # Prompt 1 has three votes for its one wrong answer, prompt 2 is a tie.
    assert found.majority.value == pytest.approx((0 + 0 + 0.5 + 7) / 10)
    assert found.whole.truncated == 0.25
    assert found.whole.mean.low < found.whole.mean.value < found.whole.mean.high


def test_intervals_of_shares_do_not_collapse_where_all_are_right() -> None:
    """A draw of equal scores has no spread; so it is with scores that are no shares."""
    right = [response(index, sample, 1.0) for index in range(20) for sample in range(4)]
    found = report_of(SETTINGS, right, 1)
    for estimate in (found.whole.mean, *found.pass_at.values(), found.majority):
        assert (estimate.value, estimate.high) == (1.0, pytest.approx(1.0))
        assert 0.8 < estimate.low < 0.9
    half = report_of(SETTINGS, [replace(one, score=0.5) for one in right], 1)
    assert half.whole.mean.low == half.whole.mean.high == 0.5


def test_its_metrics_by_name() -> None:
    metrics = report_of(SETTINGS, responses(), 1).metrics()
    figures = ["mean", "mean_low", "mean_high", "pass@1", "pass@2", "pass@4", "maj@4", "truncated", "response_tokens"]
    assert list(metrics) == [f"eval/sums/{figure}" for figure in figures]
    greedy = replace(SETTINGS, n_samples_per_prompt=1, temperature=0.0, pass_k=(1,))
    alone = report_of(greedy, [one for one in responses() if one.sample == 0], 1)
    assert alone.majority is None
    assert "eval/sums/pass@1" in alone.metrics()
    assert overall([report_of(SETTINGS, responses(), 1), alone]) == pytest.approx((0.75 + 0.9) / 2)


def test_a_score_counts_as_correct_from_the_threshold_on() -> None:
    half = [replace(one, score=one.score / 2) for one in responses()]
    assert report_of(SETTINGS, half, 1).pass_at[4].value == 0.0
    assert report_of(replace(SETTINGS, pass_score=0.5), half, 1).pass_at[4].value == pytest.approx(0.9)


def test_tables_by_source_and_length() -> None:
    found = report_of(SETTINGS, responses(), 1)
    assert [(part.name, part.prompts, part.responses) for part in found.sources] == [("large", 5, 20), ("small", 5, 20)]
    assert found.sources[0].mean.value == pytest.approx((0 + 2 + 4 + 4 + 4) / 20)
    assert [(part.name, part.prompts) for part in found.prompt_lengths] == [("2-3", 1), ("4-7", 4), ("8-15", 5)]
    # Samples 0 to 3 have 1, 6, 11 and 16 tokens.
    lengths = [(part.name, part.responses, part.truncated) for part in found.response_lengths]
    assert lengths == [("1", 10, 1.0), ("4-7", 10, 0.0), ("8-15", 10, 0.0), ("16-31", 10, 0.0)]
    assert found.response_lengths[0].mean.value == pytest.approx(0.9)
    assert report_of(replace(SETTINGS, source_key=""), [replace(r, source="") for r in responses()], 1).sources == []


def test_the_order_of_responses_does_not_matter() -> None:
    found = report_of(SETTINGS, responses(), 1)
    assert report_of(SETTINGS, responses()[::-1], 1) == found


def test_failures_are_spread_over_the_data_set() -> None:
    wrong = [response(index, sample, 0.0) for index in range(100) for sample in range(4)]
    found = report_of(SETTINGS, wrong, 1)
    assert found.failed == 100
    assert [failure["index"] for failure in found.failures] == list(range(0, 100, 5))
    assert spread(list(range(7)), LOOKED_AT) == list(range(7))
    long = report_of(SETTINGS, [replace(one, response="x" * 9000) for one in wrong], 1).failures[0]
    assert long["response"].endswith(" ... (9000 characters)")


def test_a_prompt_without_a_response_is_wrong_and_counted() -> None:
    lost = [replace(one, error="prompt too long", score=0.0) if one.index == 9 else one for one in responses()]
    found = report_of(SETTINGS, lost, 1)
    assert (found.errors, found.failed) == (1, 2)
    assert found.whole.mean.value == pytest.approx((0 + 1 + 2 + 3 + 5 * 4) / 40)
    assert "1 prompts have no response at all" in report_text([found])
    assert "error: prompt too long" in report_text([found])


@pytest.mark.parametrize(
    ("text", "pattern", "answer"),
    [
        (" 7 \n", "", "7"),
        ("so 3. #### 7", r"#### (\S+)", "7"),
        (r"\boxed{3} no, \boxed{7}", r"\\boxed\{(.*?)\}", "7"),
        ("the answer is 12", r"\d+", "12"),
        ("I do not know", r"#### (\S+)", None),
        ("<answer>a\nb</answer>", "<answer>(.*)</answer>", "a\nb"),
    ],
)
def test_the_answer_in_a_response(text: str, pattern: str, answer: str | None) -> None:
    assert answer_of(text, pattern) == answer


def test_the_text_has_tables_and_failures() -> None:
    text = report_text(
        [report_of(SETTINGS, responses(), 1), report_of(replace(SETTINGS, name="other"), responses(), 1)]
    )
    lines = text.splitlines()
    assert lines[0].split("  ")[0] == "data set"
    assert lines[1].startswith("sums ")
    assert "4 t=0.7" in lines[1]
    assert "0.7500 [" in lines[1]
    assert "1: 0.750 2: 0.833 4: 0.900" in lines[1]
    for title in ("sums, by source:", "other, by tokens of the response:"):
        assert title in lines
    assert [line.split()[0] for line in lines[lines.index("sums, by source:") + 2 :][:2]] == ["large", "small"]
    assert "sums: 1 of 10 prompts have no correct response, for example" in lines
    assert "    -> 'no idea' (length), score 0, label '1'" in lines
    assert max(map(len, lines)) < 400
    assert one_line([report_of(SETTINGS, responses(), 1)]).startswith("sums 0.7500 [")


def test_responses_are_written_one_a_line_with_all_of_their_fields(tmp_path: Path) -> None:
    path = tmp_path / "eval" / "step_000001.jsonl"
    odd = [response(0, 0, 0.25, response='"ü"\n', label=["a", 1], answer=None), response(0, 1, 1.0)]
    write_responses(path, odd)
    assert [json.loads(line) for line in path.read_text().splitlines()] == [asdict(one) for one in odd]
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    json.dumps(asdict(report_of(SETTINGS, responses(), 1)), allow_nan=False)


def test_a_surrogate_does_not_end_an_evaluation(tmp_path: Path) -> None:
    write_responses(tmp_path / "x.jsonl", [response(0, 0, 1.0, response="\ud83d")])
    assert json.loads((tmp_path / "x.jsonl").read_text())["response"] == "?"
