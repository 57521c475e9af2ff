"""Ten small chat templates in the manner of known models, each with its own format of tool calls, and a tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slurm_rlhf.data.tokenizer import Tokenizer

TOOLS = "{% if tools %}<|system|>{% for t in tools %}{{ t | tojson }}{% endfor %}<|end|>\n{% endif %}"
"""Most templates show tools as JSON."""


def chatml(call: str, tool: str = "<|tool|>{{ m.content }}<|end|>\n", tools: str = TOOLS) -> str:
    """A turn is `<|role|>text<|end|>`; `call` writes one call `c` of an assistant, `tool` what a tool answers."""
    return (
        f"{tools}{{% for m in messages %}}{{% if m.role == 'tool' %}}{tool}{{% else %}}<|{{{{ m.role }}}}|>"
        "{{ m.content or '' }}{% if m.tool_calls %}{% for t in m.tool_calls %}{% set c = t.function %}"
        f"{call}{{% endfor %}}{{% endif %}}<|end|>\n{{% endif %}}{{% endfor %}}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )


OBJECT = '{"name": "{{ c.name }}", "arguments": {{ c.arguments | tojson }}}'
PAIRS = "{% for k, v in c.arguments.items() %}"
TEMPLATES: dict[str, str] = {
    "hermes": chatml(f"\n<tool_call>\n{OBJECT}\n</tool_call>"),
    "qwen_coder": chatml(
        f"\n<tool_call>\n<function={{{{ c.name }}}}>\n{PAIRS}<parameter={{{{ k }}}}>\n{{{{ v }}}}\n</parameter>\n"
        "{% endfor %}</function>\n</tool_call>"
    ),
    "glm": chatml(
        f"\n<tool_call>{{{{ c.name }}}}\n{PAIRS}<arg_key>{{{{ k }}}}</arg_key>\n<arg_value>{{{{ v }}}}</arg_value>\n"
        "{% endfor %}</tool_call>"
    ),
    "mistral": chatml(
        f"{{% if loop.first %}}[TOOL_CALLS] [{{% endif %}}{OBJECT}{{{{ ']' if loop.last else ', ' }}}}",
        tool="[TOOL_RESULTS] {{ m.content | tojson }}[/TOOL_RESULTS]",
    ),
    "mistral_args": chatml("[TOOL_CALLS]{{ c.name }}[ARGS]{{ c.arguments | tojson }}"),
    "deepseek": chatml(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ c.name }}\n```json\n"
        "{{ c.arguments + '' }}\n```<｜tool▁call▁end｜>"
    ),
    "kimi": chatml(
        "<|tool_call_begin|>functions.{{ c.name }}:{{ loop.index0 }}<|tool_call_argument_begin|>"
        "{{ c.arguments | tojson }}<|tool_call_end|>"
    ),
    "granite": chatml(f"{{% if loop.first %}}<|tool_call|>[{{% endif %}}{OBJECT}{{{{ ']' if loop.last else ', ' }}}}"),
    "command_r": chatml(
        "{% if loop.first %}<|START_ACTION|>[{% endif %}"
        '{"tool_call_id": "0", "tool_name": "{{ c.name }}", "parameters": {{ c.arguments | tojson }}}'
        "{{ ']<|END_ACTION|>' if loop.last else ', ' }}"
    ),
    # The call stands alone, and ends with another token than an answer does.
    "llama_json": TOOLS + "{% for m in messages %}<|{{ m.role }}|>{% if m.tool_calls %}"
    '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{ m.tool_calls[0].function.arguments | tojson }}}'
    "<|call|>{% else %}{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}",
}
"""Name of the format in formats.toml -> template."""

SPECIAL = ["<|end|>", "<|call|>", *(f"<|{role}|>" for role in ("system", "user", "assistant", "tool"))]
SAMPLE = (
    'the quick brown fox looks it up: {"name": "look_up", "arguments": {"text": "a b", "count": 12}} false False\n',
    "there are 1234567 things, 8.50 of them in [lists], and <think>\nthoughts\n</think>\n\n <tool_call> of them too.\n",
)


def write_tokenizer(directory: Path, template: str, **config: Any) -> Tokenizer:
    """A byte-level BPE whose merges cross the borders of words and of texts, with `template`."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(SAMPLE * 3, trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet))
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|end|>", pad_token="<pad>", additional_special_tokens=SPECIAL, **config
    )
    made.chat_template = template
    made.save_pretrained(directory)
    call = made.convert_tokens_to_ids("<|call|>")
    (directory / "generation_config.json").write_text(f'{{"eos_token_id": [{made.eos_token_id}, {call}]}}')
    return Tokenizer.load(directory)
