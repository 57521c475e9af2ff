"""What stands around a text: the beginning-of-sequence token before it, the end-of-sequence token behind an answer."""

from __future__ import annotations

import json
from collections.abc import Sequence

from slurm_rlhf.data.tokenizer import Tokenizer
from slurm_rlhf.errors import ModelError

ANSWER = "slurm-rlhf-answer"


def without_second_bos(ids: list[int], text: str, tokenizer: Tokenizer) -> list[int]:
    """`ids` of `text` without the beginning-of-sequence token that the tokenizer adds to a text that brings its own.

    Texts that were put into a chat template beforehand begin with it; a model has never seen it twice.
    """
    bos = tokenizer.bos_token_id
    if bos is None or ids[:1] != [bos] or not text.lstrip().startswith(tokenizer.bos_token):
        return ids
    # Where the tokenizer adds none, the first one is the text's own.
    return ids[1:] if ids.count(bos) > text.count(tokenizer.bos_token) else ids


def has_double_bos(ids: Sequence[int], tokenizer: Tokenizer) -> bool:
    """True when a prompt begins with two beginning-of-sequence tokens."""
    bos = tokenizer.bos_token_id
    return bos is not None and list(ids[:2]) == [bos, bos]


def end_tokens(tokenizer: Tokenizer) -> set[int]:
    """Tokens at which engines end a response: the tokenizer's end-of-sequence token, those in generation_config.json.

    Raises ModelError for a generation_config.json that cannot be read.
    """
    file = tokenizer.directory / "generation_config.json"
    try:
        found = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id") if file.is_file() else None
    except (OSError, ValueError, AttributeError) as error:
        raise ModelError(f"{file}: cannot be read: {error}") from None
    listed = found if isinstance(found, list) else [found]
    return {tokenizer.eos_token_id} | {token for token in listed if isinstance(token, int)}


def missing_eos(tokenizer: Tokenizer) -> str:
    """What is wrong with how the chat template ends an answer; "" for nothing, and where there is no template.

    A model that was trained with the template ends its answers as the template does. Where that is by no token of
    `end_tokens`, engines sample on behind the answer, up to rollout.max_new_tokens. Raises ModelError when the template
    refuses a question and its answer.
    """
    if tokenizer.chat_template is None:
        return ""
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": ANSWER}]
    text = tokenizer.chat_template.render(turns, str(tokenizer.directory), add_generation_prompt=False)
    _, found, behind = text.rpartition(ANSWER)
    if not found:
        return ""  # the template changes what it is given: nothing can be told
    ends = end_tokens(tokenizer)
    if ends & set(tokenizer.encode(behind, add_special_tokens=False)):
        return ""
    told = f"by {behind.strip()!r}" if behind.strip() else "by nothing"
    names = " or ".join(tokenizer.decode([token], skip_special_tokens=False) for token in sorted(ends))
    return (
        f"the chat template of {tokenizer.directory} ends an answer {told}, and engines end a response at {names} "
        "only: responses may run on to rollout.max_new_tokens. Add the token with which the template ends an answer to "
        "eos_token_id in generation_config.json"
    )
