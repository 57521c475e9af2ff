"""Chat templates in the shapes of the hub's, against transformers' own rendering."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_rlhf.data.tokenizer import Tokenizer
from slurm_rlhf.parity.random_models import tiny_tokenizer

pytestmark = pytest.mark.timeout(60)
TEMPLATES = {
    # As Llama 3.1 asks: a variable of the template's own where none is given, a section of tools unless it is none.
    "defined": (
        "{%- if not tools is defined %}{%- set tools = none %}{%- endif %}"
        "{{- bos_token }}{%- if tools is not none %}{{- 'Environment: ipython' }}{%- endif %}"
        "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    ),
    # As Mistral asks: no check whether it is defined.
    "not none": (
        "{{ bos_token }}{% for m in messages %}{% if tools is not none and m == messages[-1] %}"
        "[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}[INST] {{ m.content }} [/INST]{% endfor %}"
    ),
    # As Command R asks.
    "documents": (
        "{% if documents is not none %}# Documents{% for d in documents %}{{ d.title }}{% endfor %}{% endif %}"
        "{{ messages[0].content }}{{ cls_token }}{{ sep_token }}{{ mask_token }}"
    ),
    # As Qwen asks.
    "plain": (
        "{%- if tools %}{{- tools }}{%- else %}{{- 'You are helpful.' }}{%- endif %}"
        "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' + '\\n' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
    ),
    # Which names are there at all.
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
    assert ours.chat_template is not None
    answered = ours.chat_template.render(MESSAGES[:2], "", add_generation_prompt=False)
    assert answered == theirs.apply_chat_template(MESSAGES[:2], tokenize=False, add_generation_prompt=False)
