"""A model's tokenizer without torch and without transformers, whose import alone takes longer than this room's work."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from slurm_rlhf.config.model_directory import require_tokenizer
from slurm_rlhf.data.chat import ChatTemplate
from slurm_rlhf.errors import ModelError

SPECIAL = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
"""Names in tokenizer_config.json that chat templates refer to, as in transformers."""


@dataclass(slots=True)
class Tokenizer:
    """Encodes and decodes as `transformers.AutoTokenizer` of the same directory does."""

    directory: Path
    eos_token_id: int
    pad_token_id: int  # the end-of-sequence token where the model has no padding token
    bos_token: str  # empty where the model has none
    bos_token_id: int | None
    chat_template: ChatTemplate | None
    _backend: tokenizers.Tokenizer

    @classmethod
    def load(cls, directory: Path | str) -> Tokenizer:
        """Reads tokenizer.json, tokenizer_config.json and, if it is there, chat_template.jinja.

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
        pad = _token_id(backend, special.get("pad_token"))
        words = {name: word for name in SPECIAL if (word := _content(special.get(name)))}
        source = _template_source(directory, config)
        template = ChatTemplate(source, words) if source else None
        bos = words.get("bos_token", "")
        known = _token_id(backend, bos)
        return cls(directory, eos, eos if pad is None else pad, bos, known, template, backend)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, special ones included."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of one text."""
        return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of many texts, on all CPUs."""
        return [list(e.ids) for e in self._backend.encode_batch(list(texts), add_special_tokens=add_special_tokens)]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids."""
        return str(self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def chat(self, messages: Sequence[dict[str, Any]]) -> str:
        """The messages in the model's chat template, up to where its answer starts.

        Raises ModelError when the model has no chat template or the template refuses the messages.
        """
        if self.chat_template is None:
            raise ModelError(
                f"{self.directory} has no chat template (chat_template.jinja, or chat_template in "
                "tokenizer_config.json): turn data.apply_chat_template off or add one"
            )
        return self.chat_template.render(messages, str(self.directory))


def _read_json(file: Path) -> dict[str, Any]:
    """The object in `file`, empty if there is no such file."""
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
    """A special token's text; files hold it bare or as {"content": ...}."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) and token else None


def _token_id(backend: tokenizers.Tokenizer, token: Any) -> int | None:
    text = _content(token)
    return None if text is None else backend.token_to_id(text)


def _template_source(directory: Path, config: dict[str, Any]) -> str | None:
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    source = config.get("chat_template")
    if isinstance(source, list):  # several by name
        source = {entry.get("name"): entry.get("template") for entry in source}.get("default")
    return source if isinstance(source, str) else None
