"""The model that sbatch/quickstart.sh trains, and a copy of it whose policy may call a tool."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

from checkout import ROOT
from waiting import HANG_S

SOURCES = (ROOT / "sbatch" / "quickstart_data.py", ROOT / "sbatch" / "quickstart_sft.toml")
TOOL = "read"
CALL = f'<tool_call>{{"name": "{TOOL}", "arguments": {{}}}}</tool_call>'
TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}{% for m in messages %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
)
"""What its vocabulary has no token for, such as the name of a tool, leaves none in a prompt."""


def quickstart_model(directory: Path) -> Path:
    """The fine-tuned model: that of runs/quickstart_input, or one made in `directory`, which takes a minute."""
    held, made = ROOT / "runs" / "quickstart_input", b"".join(source.read_bytes() for source in SOURCES)
    recipe = held / "recipe"
    if recipe.is_file() and recipe.read_text().strip() == hashlib.sha256(made).hexdigest():
        return held / "model"
    words = (f"--actor.model_name_or_path={directory / 'untrained'}", f"--sft.dataset={directory / 'sft.jsonl'}")
    sft = ("-m", "slurm_rlhf.cli", "sft", SOURCES[1], *words, f"--sft.output_dir={directory / 'model'}")
    for command in ((SOURCES[0], directory), sft):
        subprocess.run([sys.executable, *map(str, command)], check=True, capture_output=True, timeout=HANG_S)
    return directory / "model"


def with_tool(model: Path, directory: Path, like: str) -> None:
    """Write a copy that calls the tool by one token more, which it samples where it would `like`, but less often."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, policy = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model)
    tokenizer.add_tokens([CALL])
    tokenizer.chat_template = TEMPLATE
    policy.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    rows = policy.get_input_embeddings().weight.data
    rows[-1] = 0.9 * rows[tokenizer.convert_tokens_to_ids(like)]
    policy.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
