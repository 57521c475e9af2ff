"""Tokens of turns: none that was sampled is encoded again, for templates of ten kinds; what is refused at the start."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from chat_templates import TEMPLATES, TOOLS, chatml, write_tokenizer

from slurm_rlhf.data.tokenizer import Tokenizer
from slurm_rlhf.environments.records import ToolCall
from slurm_rlhf.environments.tool_calls import PROBE, PROBE_SCHEMA, ToolFormat, formats, tool_reader, without_end
from slurm_rlhf.environments.turn_tokens import TurnTokens
from slurm_rlhf.errors import ModelError

FEW, MANY = 300, 100_000
STRIPS = "{{ m.content.split('</think>')[-1] if m.role == 'assistant' and not loop.last else m.content }}"


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    return {name: write_tokenizer(tmp_path_factory.mktemp(name), text) for name, text in TEMPLATES.items()}


def test_every_format_has_a_template_that_writes_it(tokenizers: dict[str, Tokenizer]) -> None:
    assert {one.name for one in formats()} == set(TEMPLATES)
    assert {name: tool_reader(tokenizer).name for name, tokenizer in tokenizers.items()} == {n: n for n in TEMPLATES}
    assert [name for name in TEMPLATES if tool_reader(tokenizers[name]).as_text] == ["deepseek"]


def play(tokenizer: Tokenizer, turns: int, seed: int) -> int:
    """Play episodes of `turns` turns in all, of any tokens and of calls; return how many turns could be compared."""
    rng, reader = random.Random(seed), tool_reader(tokenizer)
    tokens, tools = TurnTokens(tokenizer, True, reader), [PROBE_SCHEMA]
    question = {"role": "user", "content": "How many?"}
    start = tokens.prompt([question], tools)
    compared = 0
    ids, sampled, kept = list(start), [], [False] * len(start)
    for _ in range(turns):
        call = ToolCall(PROBE.name, {"text": rng.choice(["a b", "falsE", "ö\n"]), "count": rng.randrange(-9, 10**6)})
        written = tokenizer.chat([question, reader.message("", [call])], tools=tools, answer=False)
        written = written[len(tokenizer.chat([question], tools=tools)) :]
        turn = tokenizer.encode(without_end(written, tokenizer), add_special_tokens=False)
        if rng.random() < 0.5:  # as no encoder would: any tokens, the special ones left out
            turn = [rng.randrange(tokenizer.backend.get_vocab_size(with_added_tokens=False)) for _ in range(8)] + turn
        ended = rng.random() < 0.9
        end = "<|call|>" if written.endswith("<|call|>") else "<|end|>"
        turn += tokenizer.encode(end, add_special_tokens=False) if ended else []
        ids, sampled, kept = ids + turn, sampled + turn, kept + [True] * len(turn)
        answer = {"role": "tool", "name": PROBE.name, "content": rng.choice(["12", "error: x", " false", ""])}
        behind = tokens.behind(ids, [answer], [call], tools)
        text = tokenizer.decode(behind, skip_special_tokens=False)
        whole = tokenizer.decode(turn[-1:] if ended else [], skip_special_tokens=False) + text
        assert whole == tokens.suffix([answer], [call], tools), (tokenizer.directory, ended)
        ids, kept = ids + behind, kept + [False] * len(behind)
        compared += [token for token, own in zip(ids, kept, strict=True) if own] == sampled
        if len(ids) > 400:
            ids, sampled, kept = list(start), [], [False] * len(start)
    return compared


@pytest.mark.parametrize("name", TEMPLATES)
def test_sampled_tokens_stay_as_they_are(tokenizers: dict[str, Tokenizer], name: str) -> None:
    turns = FEW // len(TEMPLATES)
    assert play(tokenizers[name], turns, 1) == turns


@pytest.mark.full
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("name", TEMPLATES)
def test_sampled_tokens_stay_as_they_are_in_many_turns(tokenizers: dict[str, Tokenizer], name: str) -> None:
    turns = MANY // len(TEMPLATES)
    assert play(tokenizers[name], turns, 2) == turns


@pytest.mark.parametrize("name", TEMPLATES)
def test_calls_are_read_with_thoughts_and_broken_ones_are_found(tokenizers: dict[str, Tokenizer], name: str) -> None:
    tokenizer, reader = tokenizers[name], tool_reader(tokenizers[name])
    written = tokenizer.chat([{"role": "user", "content": "?"}, reader.message("", [PROBE])], answer=False)
    written = without_end(written, tokenizer).rpartition("<|assistant|>")[2]
    assert reader.read(f"<think>{written}</think>{written}", [PROBE_SCHEMA]) == [PROBE]
    assert reader.read("I do not know.", [PROBE_SCHEMA]) == []
    broken = reader.read(written[: len(written) * 2 // 3], [PROBE_SCHEMA])
    assert [bool(call.error) for call in broken] == [True]


@pytest.mark.parametrize("name", TEMPLATES)
def test_rewards_get_what_stands_outside_calls(tokenizers: dict[str, Tokenizer], name: str) -> None:
    """In TRL's shape, as transformers' `parse_response` makes it."""
    tokenizer, reader = tokenizers[name], tool_reader(tokenizers[name])
    whole = tokenizer.chat([{"role": "user", "content": "?"}, reader.message("", [PROBE])], answer=False)
    text = f"<think>\nwho?\n</think>{'' if name == 'llama_json' else 'I ask. '}{whole.rpartition('<|assistant|>')[2]}"
    message = reader.written(reader.cut(text), text, reader.read(reader.cut(text), [PROBE_SCHEMA]))
    called = {"name": PROBE.name, "arguments": PROBE.arguments}
    assert message == {
        "role": "assistant",
        "content": "" if name == "llama_json" else "I ask.",
        "reasoning_content": "who?",
        "tool_calls": [{"type": "function", "function": called}],
    }
    assert reader.written("<think>so", "", []) == {"role": "assistant", "content": "", "reasoning_content": "so"}
    broken = [ToolCall("", error="broken"), PROBE]
    assert reader.written("", "text", broken) == {"role": "assistant", "content": "text"} | {
        "tool_calls": message["tool_calls"]
    }


def test_several_calls_are_read(tokenizers: dict[str, Tokenizer]) -> None:
    for name in set(TEMPLATES) - {"llama_json"}:
        reader, other = tool_reader(tokenizers[name]), ToolCall(PROBE.name, {"text": "b", "count": 8})
        question = {"role": "user", "content": "?"}
        written = tokenizers[name].chat([question, reader.message("", [PROBE, other])], answer=False)
        text = without_end(written, tokenizers[name])
        assert reader.read(text, [PROBE_SCHEMA]) == [PROBE, other], name


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('<tool_call>{"name": "look_up", "arguments": {"text": }}</tool_call>', "not valid JSON"),
        ('<tool_call>{"arguments": {}}</tool_call>', "a call has a name"),
        ('<tool_call>{"name": "look_up", "arguments": 3}</tool_call>', "an object of arguments"),
        ('<tool_call>{"name": "look_up"', "not complete"),
        ("<|tool_call|>[3]", "a call is an object with name and arguments, not 3"),
        ('<tool_call>{"name": ' + "[" * 2000 + "}</tool_call>", "nested more than 100 deep"),
        ('<tool_call>{"name": "look_up", "arguments": "' + "[" * 2000 + '"}</tool_call>', "an object of arguments"),
    ],
)
def test_what_is_wrong_with_a_call_is_said(tokenizers: dict[str, Tokenizer], text: str, said: str) -> None:
    (call,) = tool_reader(tokenizers["granite" if "|" in text else "hermes"]).read(text, [PROBE_SCHEMA])
    assert said in call.error


OPEN = {
    "mistral_args": "[TOOL_CALLS]a{",
    "qwen_coder": "<tool_call><function=a>",
    "glm": "<tool_call>aaaaaaaaaaaa",
    "kimi": "<|tool_call_begin|>a<|tool_call_argument_begin|>",
    "deepseek": "<｜tool▁call▁begin｜>a<｜tool▁sep｜>",
    "command_r": "<|START_ACTION|>[",
    "granite": "<|tool_call|>[",
    "mistral": "[TOOL_CALLS][",
}


def seconds(read: Callable[[str], Any], text: str) -> float:
    took = []
    for _ in range(3):
        began = time.process_time()
        read(text)
        took.append(time.process_time() - began)
    return min(took)


@pytest.mark.parametrize("one", formats(), ids=lambda one: one.name)
def test_unclosed_calls_are_read_in_linear_time(one: ToolFormat) -> None:
    text = OPEN.get(one.name, "<tool_call>{")
    assert all(call.error for call in one.read(text * 9, []))
    read = partial(one.read, schemas=[])
    assert seconds(read, text * 16_000) < 4 * 16 * seconds(read, text * 1_000)


@pytest.mark.parametrize(("name", "pair"), [("glm", "<arg_key></arg_key><arg_value>"), ("qwen_coder", "<parameter=a>")])
def test_unclosed_arguments_are_read_in_linear_time(name: str, pair: str) -> None:
    (found,) = [one.pair for one in formats() if one.name == name]
    assert seconds(found.findall, pair * 16_000) < 4 * 16 * seconds(found.findall, pair * 1_000)


def test_a_tokenizer_that_says_how_it_is_read_is_read_so(tmp_path: Path) -> None:
    call = "<<{{ c.name }} {{ c.arguments | tojson }}>>"
    template = {
        "start_anchor": "<|assistant|>",
        "fields": {
            "content": {"close": "<|end|>"},
            "tool_calls": {
                "open_pattern": r"<<(?P<name>\w+) ",
                "close": ">>",
                "repeats": True,
                "content": "json",
                "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
            },
        },
    }
    with pytest.raises(ModelError, match=r"none of the known formats.*response_template"):
        tool_reader(write_tokenizer(tmp_path / "a", chatml(call)))
    fields = template["fields"]
    assert isinstance(fields, dict)
    for close in (">>", ">><|end|>"):  # TRL's for Llama 3 has the end of the turn in it
        fields["tool_calls"]["close"] = close
        reader = tool_reader(write_tokenizer(tmp_path / "b", chatml(call), response_template=template))
        assert reader.name == "response_template"
        written = reader.cut('So.<<look_up {"text": "slurm-rlhf", "count": 7}>><|end|>')
        message = reader.written(written, "", reader.read(written, [PROBE_SCHEMA]))
        assert message == reader.message("So.", [PROBE]) | {"tool_calls": message["tool_calls"]}
        assert reader.read(written, [PROBE_SCHEMA]) == [PROBE]
        assert "the call cannot be read: " in reader.read("<<look_up {>>", [PROBE_SCHEMA])[0].error
    with pytest.raises(ModelError, match="calls of tools cannot be read"):
        tool_reader(write_tokenizer(tmp_path / "c", TEMPLATES["hermes"], response_template=template))


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (chatml("{{ c.name }}", tools=""), "does not show tools"),
        (chatml(""), "it writes '', in which none"),
        (chatml("{{ raise_exception('no calls') }}"), "no calls"),
        (chatml(f"<tool_call>{{{{ {{}} }}}}{'{{ c.name }}'}</tool_call>"), "calls of tools cannot be read"),
    ],
)
def test_a_template_without_tools_is_refused(tmp_path: Path, template: str, said: str) -> None:
    with pytest.raises(ModelError, match=said):
        tool_reader(write_tokenizer(tmp_path, template))


def test_a_template_that_does_not_show_what_tools_answer_is_refused(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path, TEMPLATES["hermes"].replace("<|tool|>{{ m.content }}<|end|>\n", ""))
    with pytest.raises(ModelError, match="does not show the model what tools answer"):
        TurnTokens(tokenizer, True, tool_reader(tokenizer))


@pytest.mark.parametrize(
    "stripped", [STRIPS, "{{ m.content if loop.last else m.content[:2] }}", STRIPS.replace("not loop.last", "true")]
)
def test_a_template_that_strips_earlier_thoughts_is_refused(tmp_path: Path, stripped: str) -> None:
    template = f"{TOOLS}{{% for m in messages %}}<|{{{{ m.role }}}}|>{stripped}<|end|>{{% endfor %}}"
    with pytest.raises(ModelError, match=r"changes earlier messages when others follow.*chat_template.jinja"):
        TurnTokens(write_tokenizer(tmp_path, template), True)


def test_thoughts_may_be_stripped_before_the_last_question(tmp_path: Path) -> None:
    """As Qwen3 does: nobody asks between calls of tools, so it keeps all of an episode with tools."""
    last = "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    kept = TEMPLATES["hermes"].replace(
        "{{ m.content or '' }}", "{{ m.content if loop.index0 >= ns.last else m.content.split('</think>')[-1] }}"
    )
    tokenizer = write_tokenizer(tmp_path, f"{last}{{% set ns.last = loop.index0 %}}{{% endif %}}{{% endfor %}}{kept}")
    TurnTokens(tokenizer, True, tool_reader(tokenizer))
    with pytest.raises(ModelError, match="strips the thinking"):
        TurnTokens(tokenizer, True)
