"""Encode and decode text as a model does, without torch and without transformers, whose import takes seconds.

A generating model gets the tokens of the prompt alone, and appends those of its answer. So an answer to train on must
be a list of tokens that, appended to those of the prompt, decode to the text of prompt and answer. In this order:

1. Tokenize prompt and answer as one text, and take what follows the prompt's tokens. SentencePiece puts a space before
   a text that stands alone ("4" is `_4`), and none inside a text ("2+2=4" ends in `4`).
2. If the one text has other tokens at the border (one token holds the end of the prompt and the beginning of the
   answer), tokenize the answer alone. Its tokens are right if they decode to the text (byte-level BPE).
3. If they do not (SentencePiece: the space), tokenize the answer after a mark that is a token of its own.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from slurm_rlhf.config.model_directory import require_tokenizer
from slurm_rlhf.data.chat_template import ChatTemplate
from slurm_rlhf.errors import ModelError
from slurm_rlhf.records import Prompt

SPECIAL = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
"""Names in tokenizer_config.json that chat templates refer to, as in transformers."""

# Tokens of context with which a decoder knows that it is not at the start of a text; as many as vLLM's detokenizer has.
CONTEXT_TOKENS = 5


@dataclass(slots=True)
class Tokenizer:
    """Encode and decode as `transformers.AutoTokenizer` of the same directory does."""

    directory: Path
    eos_token_id: int
    bos_token: str  # empty where the model has none
    bos_token_id: int | None
    chat_template: ChatTemplate | None
    backend: tokenizers.Tokenizer
    response_template: dict[str, Any] | None = None  # how transformers reads responses; None: the model brings none

    @classmethod
    def load(cls, directory: Path | str) -> Tokenizer:
        """Read tokenizer.json, tokenizer_config.json and, if it is there, chat_template.jinja.

        Raises ModelError when there is no tokenizer, when it cannot be read, or when it has no end-of-sequence token.
        """
        directory = Path(directory)
        file = require_tokenizer(directory)
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises nothing narrower
            raise ModelError(f"{file}: not a tokenizer that can be read: {error}") from None
        backend.no_truncation()
        backend.no_padding()
        config = _read_json(directory / "tokenizer_config.json")
        special = _read_json(directory / "special_tokens_map.json") | config
        eos = _token_id(backend, special.get("eos_token"))
        if eos is None:
            raise ModelError(
                f"{directory}: tokenizer_config.json names no eos_token that tokenizer.json knows: responses could "
                "never end; set it with `tokenizer.eos_token = ...; tokenizer.save_pretrained(directory)`"
            )
        words = {name: word for name in SPECIAL if (word := _content(special.get(name)))}
        # transformers marks the special tokens itself that tokenizer.json does not mark as special.
        marked = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
        unmarked = [word for word in words.values() if word not in marked and backend.token_to_id(word) is not None]
        backend.add_special_tokens(unmarked)
        template_file, source = _template_source(directory, config)
        template = ChatTemplate(source, words, str(template_file)) if source else None
        bos = words.get("bos_token", "")
        return cls(directory, eos, bos, _token_id(backend, bos), template, backend, config.get("response_template"))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of one text."""
        return self.encode_batch([text], add_special_tokens=add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Return the token ids of many texts, computed on all CPUs."""
        return [list(encoding.ids) for encoding in self.encodings(texts, add_special_tokens=add_special_tokens)]

    def encodings(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[tokenizers.Encoding]:
        """Encode many texts; an encoding has the tokens, and their offsets in the text."""
        try:
            return list(self.backend.encode_batch(list(texts), add_special_tokens=add_special_tokens))
        except Exception as error:  # the library raises nothing narrower
            raise ModelError(f"the tokenizer of {self.directory} cannot encode a text: {error}") from None

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids."""
        return str(self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def response_text(self, prompt_ids: list[int], response_ids: list[int]) -> str:
        """Decode `response_ids` as the continuation of the prompt, without special tokens.

        Decoded alone, a response would lose its first space with tokenizers that write it at the start of every word
        (SentencePiece). So the prompt's last tokens are decoded with it, and their text is removed.
        """
        context = prompt_ids[-CONTEXT_TOKENS:]
        before, whole = self.decode(context), self.decode(context + response_ids)
        return whole[len(before) :] if whole.startswith(before) else self.decode(response_ids)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each token, special ones included; joined they are the whole text.

        A character that several tokens make up belongs to the last of them; incomplete characters are left out.
        """
        from tokenizers.decoders import DecodeStream

        stream = DecodeStream(skip_special_tokens=False)
        return [stream.step(self.backend, int(token)) or "" for token in ids]

    def chat(
        self,
        messages: Sequence[dict[str, Any]],
        where: str = "",
        *,
        tools: Sequence[dict[str, Any]] = (),
        answer: bool = True,
    ) -> str:
        """Render the messages with the model's chat template. `where`: their position in the data, for errors.

        `tools`: the schemas of the tools that the model may call; `answer`: append the header of its answer.

        Raises ModelError when the model has no chat template or the template refuses the messages.
        """
        if self.chat_template is None:
            raise ModelError(
                f"{self.directory} has no chat template (chat_template.jinja, or chat_template in "
                "tokenizer_config.json): turn data.apply_chat_template off or add one"
            )
        place = where or str(self.directory)
        return self.chat_template.render(messages, place, add_generation_prompt=answer, tools=tools)


def _read_json(file: Path) -> dict[str, Any]:
    """Read the object in `file`; empty if there is no such file."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ModelError(f"{file}: cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{file}: a JSON object is needed")
    return value


def _content(token: Any) -> str | None:
    """Return the text of a special token; files hold it as a string or as {"content": ...}."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) and token else None


def _token_id(backend: tokenizers.Tokenizer, token: Any) -> int | None:
    text = _content(token)
    return None if text is None else backend.token_to_id(text)


def _template_source(directory: Path, config: dict[str, Any]) -> tuple[Path, str | None]:
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file, file.read_text(encoding="utf-8")
    source = config.get("chat_template")
    if isinstance(source, list):  # several by name
        source = {entry.get("name"): entry.get("template") for entry in source}.get("default")
    return directory / "tokenizer_config.json", source if isinstance(source, str) else None


ANSWER = "slurm-rlhf-answer"
MARKS = ("\n", "=", ":", "0", "a")
"""Tried in turn: a mark must not merge into one token with the beginning of the answer."""


def encode_prompts(texts: Sequence[str], tokenizer: Tokenizer, templated: bool) -> list[list[int]]:
    """Return the token ids of prompts, or of prompts with their answers.

    They get the tokenizer's own special tokens, as `tokenizer(text)` adds them, but never a second
    beginning-of-sequence token. Texts made by a chat template (`templated`) get those of the template alone.
    """
    if templated:
        return tokenizer.encode_batch(texts, add_special_tokens=False)
    return [
        without_second_bos(ids, text, tokenizer) for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True)
    ]


def without_second_bos(ids: list[int], text: str, tokenizer: Tokenizer) -> list[int]:
    """Remove the beginning-of-sequence token that the tokenizer added to a text which already begins with one.

    Texts that were put into a chat template beforehand begin with it; a model has never seen it twice.
    """
    bos = tokenizer.bos_token_id
    if bos is None or ids[:1] != [bos] or not text.lstrip().startswith(tokenizer.bos_token):
        return ids
    # Where the tokenizer adds none, the first one comes from the text.
    return ids[1:] if ids.count(bos) > text.count(tokenizer.bos_token) else ids


def has_double_bos(ids: Sequence[int], tokenizer: Tokenizer) -> bool:
    """Tell whether a prompt begins with two beginning-of-sequence tokens."""
    bos = tokenizer.bos_token_id
    return bos is not None and list(ids[:2]) == [bos, bos]


def end_tokens(tokenizer: Tokenizer) -> set[int]:
    """List the tokens at which engines end a response: the tokenizer's, and those in generation_config.json.

    Engines take those in config.json where the former is missing. Raises ModelError when the file cannot be read.
    """
    files = (tokenizer.directory / name for name in ("generation_config.json", "config.json"))
    found = next(filter(None, map(_read_json, files)), {}).get("eos_token_id")
    listed = found if isinstance(found, list) else [found]
    return {tokenizer.eos_token_id} | {token for token in listed if isinstance(token, int)}


def behind_answer(tokenizer: Tokenizer) -> str | None:
    """Return what the chat template writes after an answer; None: it changes the answer, so nothing can be concluded.

    Raises ModelError when there is no template, or it refuses a question and its answer.
    """
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": ANSWER}]
    _, found, behind = tokenizer.chat(turns, answer=False).rpartition(ANSWER)
    return behind if found else None


def missing_eos(tokenizer: Tokenizer) -> str:
    """Return a warning if engines do not recognise the end of an answer by the chat template; "" if none is needed.

    A model that was trained with the template ends its answers as the template does. If no token of `end_tokens` is
    among those, engines go on sampling after the answer, up to rollout.max_new_tokens. Raises ModelError when the
    template refuses a question and its answer.
    """
    behind = None if tokenizer.chat_template is None else behind_answer(tokenizer)
    if behind is None:
        return ""
    ends = end_tokens(tokenizer)
    if ends & set(tokenizer.encode(behind, add_special_tokens=False)):
        return ""
    by = f"by {behind.strip()!r}" if behind.strip() else "by nothing"
    names = " or ".join(tokenizer.decode([token], skip_special_tokens=False) for token in sorted(ends))
    return (
        f"the chat template of {tokenizer.directory} ends an answer {by}, and engines end a response at {names} "
        "only: responses may run on to rollout.max_new_tokens. Add the token with which the template ends an answer to "
        "eos_token_id in generation_config.json"
    )


def ids_behind(before: list[int], text: str, tokenizer: Tokenizer) -> list[int]:
    """Return the token ids of `text` as a continuation of the tokens `before`, which stay as they are."""
    context = before[-CONTEXT_TOKENS:]
    return _joining(context, text, tokenizer.decode(context, skip_special_tokens=False) + text, tokenizer)


def continuations(
    prompts: Sequence[Prompt], answers: Sequence[str], tokenizer: Tokenizer, templated: bool
) -> list[list[int]]:
    """Return the token ids of each answer as a continuation of its prompt; `templated` as in `encode_prompts`."""
    wholes = [prompt.text + answer for prompt, answer in zip(prompts, answers, strict=True)]
    return [
        _behind(prompt.token_ids.tolist(), whole, answer, tokenizer)
        for prompt, whole, answer in zip(prompts, encode_prompts(wholes, tokenizer, templated), answers, strict=True)
    ]


def _behind(prompt: list[int], whole: list[int], answer: str, tokenizer: Tokenizer) -> list[int]:
    if whole[: len(prompt)] == prompt:
        return whole[len(prompt) :]
    return _joining(prompt, answer, tokenizer.decode(whole, skip_special_tokens=False), tokenizer)


def _joining(before: list[int], text: str, whole: str, tokenizer: Tokenizer) -> list[int]:
    """Return the token ids of `text` with which those `before` decode to `whole`."""
    alone = tokenizer.encode(text, add_special_tokens=False)
    for ids in (alone, *_after_marks(text, tokenizer)):
        if tokenizer.decode(before + ids, skip_special_tokens=False) == whole:
            return ids
    return alone  # this tokenizer does not decode to the text that it encoded: nothing better is known


def _after_marks(answer: str, tokenizer: Tokenizer) -> list[list[int]]:
    found = []
    for mark in MARKS:
        before = tokenizer.encode(mark, add_special_tokens=False)
        both = tokenizer.encode(mark + answer, add_special_tokens=False)
        if both[: len(before)] == before:
            found.append(both[len(before) :])
    return found
