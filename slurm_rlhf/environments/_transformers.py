"""The parts of transformers that environments need, written for transformers 5.19.0. They import no torch.

utils/chat_template_utils.py get_json_schema(func)
utils/chat_template_utils.py DocstringParsingException
utils/chat_template_utils.py TypeHintParsingException
utils/chat_parsing/response_parser.py parse_response(text, response_template, *, prefix, tools)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from slurm_rlhf.errors import EpisodeError


def json_schema(function: Callable[..., Any]) -> dict[str, Any]:
    """Describe a tool by its type hints and its docstring.

    Raises ValueError that says what they lack, EpisodeError where the library is missing, as it may be on a server.
    """
    try:
        from transformers.utils import chat_template_utils as library
    except ImportError as error:
        raise EpisodeError(f"{error}: tools are described by transformers: pip install transformers") from None
    try:
        return dict(library.get_json_schema(function))
    except (library.DocstringParsingException, library.TypeHintParsingException) as error:
        raise ValueError(str(error)) from None


def parsed_response(
    text: str, template: Mapping[str, Any], prompt: str, tools: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Read a response by a tokenizer's `response_template`; return the message. Raises ValueError."""
    from transformers.utils.chat_parsing.response_parser import parse_response

    return dict(parse_response(text, dict(template), prefix=prompt, tools=list(tools)))


def tokenizer_class() -> Any:
    """Import the class of tokenizers that are read from tokenizer.json; it takes seconds, and imports no torch."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast


@cache
def hf_tokenizer(directory: str) -> Any:
    """Read a tokenizer as OpenRLHF gives one to agents, once. Raises OSError or ValueError."""
    return tokenizer_class().from_pretrained(directory)
