"""Text and tokens: what a tokenizer puts around a text, chat templates, and texts that go on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from lookalikes import llama_like, sentencepiece_like
from random_models import CHARACTERS, EOS, PAD, tiny_tokenizer

from slurm_rlhf.config.schema import Data
from slurm_rlhf.data.prompts import PromptSet
from slurm_rlhf.data.tokenizer import Tokenizer, has_double_bos, ids_behind, missing_eos
from slurm_rlhf.errors import DataError, ModelError
from slurm_rlhf.stages.examples import load_examples

TEXTS = ["1+1=2", "a b  c", CHARACTERS, f"ab{EOS}{PAD}c", "ü?", ""]

TEMPLATE = """\
{%- if messages[0].role == 'system' %}
    {{- raise_exception('no system ' + strftime_now('%Y')) }}
{%- endif %}
{% for message in messages %}
    {% if loop.index > 3 %}{% break %}{% endif %}
{{ eos_token }}{{ message | tojson }}
{% generation %}{{ message.content }}{% endgeneration %}
{% endfor %}
{% if add_generation_prompt %}answer:{% endif %}
"""


def save(directory: Path, template: str | None = None) -> Path:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(directory)
    return directory


@pytest.mark.parametrize("arch", ["qwen2", "qwen3", "llama"])
def test_agrees_with_transformers(tmp_path: Path, arch: str) -> None:
    from transformers import AutoConfig, AutoTokenizer

    save(tmp_path)
    AutoConfig.for_model(arch).save_pretrained(tmp_path)
    if arch == "llama":  # tokens with settings, as transformers writes them for some
        file = tmp_path / "tokenizer_config.json"
        file.write_text(
            json.dumps(json.loads(file.read_text()) | {"eos_token": {"content": EOS, "__type": "AddedToken"}})
        )
    ours, theirs = Tokenizer.load(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert ours.eos_token_id == 1
    for text, batched in zip(TEXTS, ours.encode_batch(TEXTS), strict=True):
        ids = theirs(text).input_ids
        assert ours.encode(text) == batched == ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids)


def test_the_text_of_a_response_keeps_its_first_space(tmp_path: Path) -> None:
    """SentencePiece writes it at the start of every word, and leaves that of the first word out."""
    tokenizer = Tokenizer.load(sentencepiece_like(tmp_path))
    prompt, response = (tokenizer.encode(text, add_special_tokens=False) for text in ("one two", "three"))
    assert tokenizer.decode(response) == "three"
    assert tokenizer.response_text(prompt, response) == " three"
    assert tokenizer.response_text(prompt, []) == ""


def test_tokens_that_only_the_settings_call_special_are_left_out_of_texts(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    save(tmp_path)
    file = tmp_path / "tokenizer.json"
    stored = json.loads(file.read_text())
    stored["added_tokens"] = []
    file.write_text(json.dumps(stored))
    ids = [*Tokenizer.load(tmp_path).encode("1+"), 1]
    assert Tokenizer.load(tmp_path).decode(ids) == "1+"
    assert AutoTokenizer.from_pretrained(tmp_path).decode(ids, skip_special_tokens=True) == "1+"


@pytest.mark.parametrize("where", ["file", "config", "named"])
def test_chat_template_renders_as_in_transformers(tmp_path: Path, where: str) -> None:
    save(tmp_path, TEMPLATE)
    if where != "file":
        (tmp_path / "chat_template.jinja").unlink()
        file = tmp_path / "tokenizer_config.json"
        template = TEMPLATE if where == "config" else [{"name": "default", "template": TEMPLATE}]
        file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": template}))
    messages = [{"role": "user", "content": f"<{i}> ü"} for i in range(5)]
    theirs = tiny_tokenizer()
    theirs.chat_template = TEMPLATE
    expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert Tokenizer.load(tmp_path).chat(messages) == expected
    assert "<2> ü" in expected
    assert "<3>" not in expected


def test_template_that_refuses(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(save(tmp_path, TEMPLATE))
    for where in ("", "rows.jsonl:7"):
        stated = rf"^{where or tmp_path}: the chat template in .*jinja failed on .* roles system: no system 20\d\d"
        with pytest.raises(ModelError, match=stated):
            tokenizer.chat([{"role": "system", "content": "x"}], where)
    broken = Tokenizer.load(save(tmp_path, "{% if %}"))
    with pytest.raises(ModelError, match=r"the chat template in .* failed"):
        broken.chat([{"role": "user", "content": "x"}])
    hostile = Tokenizer.load(save(tmp_path, "{{ messages.__class__.__mro__ }}"))
    with pytest.raises(ModelError, match="unsafe"):
        hostile.chat([{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("tokenizer.json", None, "holds no tokenizer (tokenizer.json): save the model's tokenizer there"),
        ("tokenizer.json", "{", "tokenizer.json: not a tokenizer that can be read"),
        ("tokenizer_config.json", None, "names no eos_token that tokenizer.json knows"),
        ("tokenizer_config.json", '{"eos_token": "<other>"}', "names no eos_token that tokenizer.json knows"),
        ("tokenizer_config.json", "{", "tokenizer_config.json: cannot be read"),
        ("tokenizer_config.json", "[]", "a JSON object is needed"),
    ],
)
def test_bad_directory(tmp_path: Path, name: str, content: str | None, named: str) -> None:
    save(tmp_path)
    if content is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_text(content)
    with pytest.raises(ModelError) as caught:
        Tokenizer.load(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert named in str(caught.value)


TEMPLATES = {
    # Llama 3.1 asks like this: the template sets a variable where none is given, and has no tools if it is none.
    "defined": (
        "{%- if not tools is defined %}{%- set tools = none %}{%- endif %}"
        "{{- bos_token }}{%- if tools is not none %}{{- 'Environment: ipython' }}{%- endif %}"
        "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    ),
    # Mistral does not check whether a name is defined.
    "not none": (
        "{{ bos_token }}{% for m in messages %}{% if tools is not none and m == messages[-1] %}"
        "[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}[INST] {{ m.content }} [/INST]{% endfor %}"
    ),
    # Command R asks for documents.
    "documents": (
        "{% if documents is not none %}# Documents{% for d in documents %}{{ d.title }}{% endfor %}{% endif %}"
        "{{ messages[0].content }}{{ cls_token }}{{ sep_token }}{{ mask_token }}"
    ),
    # Qwen asks for tools.
    "plain": (
        "{%- if tools %}{{- tools }}{%- else %}{{- 'You are helpful.' }}{%- endif %}"
        "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' + '\\n' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
    ),
    # This one shows which names there are.
    "is defined": "{{ tools is defined }} {{ documents is defined }} {{ tools is none }} {{ documents is none }}",
}
MESSAGES = [
    {"role": "user", "content": " 1+1? "},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "?"},
]


@pytest.mark.parametrize("shape", TEMPLATES)
def test_renders_as_transformers_does(tmp_path: Path, shape: str) -> None:
    theirs = tiny_tokenizer()
    theirs.add_special_tokens(
        {"bos_token": "<bos>", "cls_token": "<cls>", "sep_token": "<sep>", "mask_token": "<mask>"}
    )
    theirs.chat_template = TEMPLATES[shape]
    theirs.save_pretrained(tmp_path)
    expected = theirs.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    ours = Tokenizer.load(tmp_path)
    assert ours.chat(MESSAGES) == expected
    assert "TOOLS" not in expected
    answered = ours.chat_template.render(MESSAGES[:2], "", add_generation_prompt=False)
    assert answered == theirs.apply_chat_template(MESSAGES[:2], tokenize=False, add_generation_prompt=False)


def test_a_prompt_of_unknown_letters_is_not_called_empty(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(save(tmp_path))
    file = tmp_path / "prompts.jsonl"
    for text, stated in (("漢", "the prompt '漢' gives no token"), ("", "the prompt is empty")):
        file.write_text(json.dumps({"input": text}) + "\n")
        with pytest.raises(DataError, match=f"prompts.jsonl:1: {stated}"):
            PromptSet.load(file, tokenizer, Data(), 100)


# --- framing ----------------------------------------------------------------------------------------------------------


FAMILIES: dict[str, tuple[Callable[[Path], Path], str]] = {
    "llama": (llama_like, "<|begin_of_text|>"),
    "sentencepiece": (sentencepiece_like, "<s>"),
}
ANSWERS = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}END{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def prompt_ids(directory: Path, text: str) -> tuple[Tokenizer, list[int]]:
    tokenizer = Tokenizer.load(directory)
    file = directory / "rows.jsonl"
    file.write_text(json.dumps({"input": text}) + "\n")
    return tokenizer, PromptSet.load(file, tokenizer, Data(), 200)[0].token_ids.tolist()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("body", ["[INST] 1+1 [/INST]", "[INST] a [/INST] b{eos}{bos}[INST] c [/INST]"])
def test_text_that_was_templated_beforehand_begins_once(tmp_path: Path, family: str, body: str) -> None:
    make, bos = FAMILIES[family]
    text = bos + body.format(bos=bos, eos="")
    tokenizer, ids = prompt_ids(make(tmp_path), text)
    assert ids == tokenizer.encode(text, add_special_tokens=False)
    assert ids.count(tokenizer.bos_token_id or -1) == text.count(bos)
    assert ids[0] == tokenizer.bos_token_id
    assert not has_double_bos(ids, tokenizer)
    assert has_double_bos(tokenizer.encode(text), tokenizer)  # transformers' own tokenizer(text) adds a second one


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_text_keeps_the_token_that_the_tokenizer_adds(tmp_path: Path, family: str) -> None:
    make, bos = FAMILIES[family]
    for text in ("1+1=", f"what is {bos} ?"):
        tokenizer, ids = prompt_ids(make(tmp_path), text)
        assert ids == tokenizer.encode(text)
        assert ids[0] == tokenizer.bos_token_id


def test_blanks_before_it_make_no_difference(tmp_path: Path) -> None:
    tokenizer, ids = prompt_ids(sentencepiece_like(tmp_path), " <s>[INST]")
    assert ids.count(tokenizer.bos_token_id or -1) == 1


@pytest.mark.parametrize(
    ("end", "listed", "stated"),
    [
        ("<|end_of_text|>", None, ""),
        ("<|eot_id|>\n", None, "ends an answer by '<|eot_id|>'"),
        ("<|eot_id|>\n", "<|eot_id|>", ""),
        ("", None, "ends an answer by nothing"),
        ("\n", "<|eot_id|>", "engines end a response at <|end_of_text|> or <|eot_id|> only"),
    ],
)
def test_a_template_whose_answers_do_not_end_is_reported(
    tmp_path: Path, end: str, listed: str | None, stated: str
) -> None:
    tokenizer = Tokenizer.load(llama_like(tmp_path, template=ANSWERS.replace("END", end)))
    if listed:
        ends = [tokenizer.eos_token_id, tokenizer.encode(listed, add_special_tokens=False)[0]]
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    said = missing_eos(tokenizer)
    assert stated in said
    assert bool(stated) == bool(said)
    assert "generation_config.json" in said or not stated


def test_ends_in_config_json_count_where_there_is_no_generation_config(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(llama_like(tmp_path, template=ANSWERS.replace("END", "<|eot_id|>\n")))
    ends = {"eos_token_id": tokenizer.encode("<|eot_id|>", add_special_tokens=False)}
    (tmp_path / "config.json").write_text(json.dumps(ends))
    assert missing_eos(tokenizer) == ""
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": tokenizer.eos_token_id}))
    assert missing_eos(tokenizer) != ""


def test_without_a_template_there_is_nothing_to_tell(tmp_path: Path) -> None:
    """The same model would be warned of one whose answers do not end."""
    assert missing_eos(Tokenizer.load(llama_like(tmp_path))) == ""
    assert missing_eos(Tokenizer.load(llama_like(tmp_path, template=ANSWERS.replace("END", "")))) != ""


# --- continuation -----------------------------------------------------------------------------------------------------


def example(directory: Path, prompt: str, answer: str) -> tuple[list[str], list[str], str]:
    """(tokens of the prompt, tokens of the response, text of both) as they are trained on."""
    tokenizer = Tokenizer.load(directory)
    file = directory / "rows.jsonl"
    file.write_text(json.dumps({"input": prompt, "output": answer}) + "\n")
    found = load_examples(file, tokenizer, Data(max_len=100)).experience
    ids, length = found.token_ids.tolist(), int(found.prompt_lens[0])
    assert ids[:length] == tokenizer.encode(prompt)  # generation begins behind these
    names = [tokenizer.backend.id_to_token(token) for token in ids]
    return names[:length], names[length:], tokenizer.decode(ids)


@pytest.mark.parametrize(
    ("pieces", "prompt", "answer", "expected"),
    [
        ((), "2+2=", "4", ["4"]),
        (("▁4",), "2+2=", "4", ["4"]),  # the answer alone would be "▁4"
        (("▁4",), "2+2= ", "4", ["4"]),  # prompt and answer together end in it: no token of the prompt's
        (("▁4",), "2+2=", " 4", ["▁4"]),
        (("=4", "=42"), "2+2=", "42", ["4", "2"]),  # one token holds the seam
        ((), "2+2=", "ü", ["<0xC3>", "<0xBC>"]),
        ((), "2+2=", "", []),
    ],
)
def test_sentencepiece(tmp_path: Path, pieces: tuple[str, ...], prompt: str, answer: str, expected: list[str]) -> None:
    _, response, text = example(sentencepiece_like(tmp_path, pieces), prompt, answer)
    assert response == [*expected, "</s>"]
    assert text == prompt + answer


@pytest.mark.parametrize(
    ("merges", "prompt", "answer", "expected"),
    [
        ((), "2+2=", "4", ["4"]),
        ((("=", "4"),), "2+2=", "4", ["4"]),
        ((("=", "4"), ("4", "2")), "2+2=", "42", ["42"]),
        ((("Ġ", "4"),), "2+2= ", "42", ["4", "2"]),
        ((("Ġ", "4"),), "2+2=", " 42", ["Ġ4", "2"]),
    ],
)
def test_byte_level_bpe(
    tmp_path: Path, merges: tuple[tuple[str, str], ...], prompt: str, answer: str, expected: list[str]
) -> None:
    _, response, text = example(llama_like(tmp_path, merges), prompt, answer)
    assert response == [*expected, "<|end_of_text|>"]
    assert text == prompt + answer


def test_templated_text_is_trained_with_one_beginning(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(sentencepiece_like(tmp_path))
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"input": "<s>[INST] 2+2 [/INST]", "output": "4"}) + "\n")
    found = load_examples(file, tokenizer, Data(max_len=100)).experience
    assert found.token_ids.tolist().count(tokenizer.bos_token_id or -1) == 1
    assert found.response_lens.tolist() == [2]


@pytest.mark.parametrize("make", [llama_like, sentencepiece_like])
@pytest.mark.parametrize("text", ["higher", " 4 or more", "\nno: 7"])
def test_a_text_behind_tokens_gains_no_space(tmp_path: Path, make: Callable[..., Path], text: str) -> None:
    tokenizer = Tokenizer.load(make(tmp_path))
    before = tokenizer.encode("a guess: 3")
    ids = ids_behind(before, text, tokenizer)
    assert tokenizer.decode(before + ids) == tokenizer.decode(before) + text
