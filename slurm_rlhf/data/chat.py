"""Chat templates as transformers renders them.

Jinja in its immutable sandbox, with the settings, filters and functions that templates on the Hugging Face hub
rely on (transformers, `utils/chat_template_utils.py`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from slurm_rlhf.errors import ModelError


class ChatTemplate:
    """One compiled template; `special` holds bos_token and the like, which templates refer to by name."""

    def __init__(self, source: str, special: dict[str, str]) -> None:
        self.source = source
        self.special = special
        self._compiled: Any = None

    def render(self, messages: Sequence[dict[str, Any]], where: str, *, add_generation_prompt: bool = True) -> str:
        """The messages as text, with the header of the answer at the end unless `add_generation_prompt` is False.

        `tools` and `documents` are None as in transformers: templates ask `is not none`, which holds for what is
        undefined. Raises ModelError, naming `where`, when the template does not compile or refuses the messages.
        """
        import jinja2  # here, because most runs need no template

        try:
            if self._compiled is None:
                self._compiled = _environment().from_string(self.source)
            text: str = self._compiled.render(
                messages=list(messages),
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self.special,
            )
        except jinja2.TemplateError as error:
            raise ModelError(f"{where}: the chat template failed on {_roles(messages)}: {error}") from None
        return text


def _environment() -> Any:
    from jinja2 import nodes
    from jinja2.exceptions import TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks the assistant's words for training; it renders as what it holds."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
        # Jinja's own filter escapes HTML.
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda style: datetime.now().strftime(style)
    return environment


def _roles(messages: Sequence[dict[str, Any]]) -> str:
    return "messages with roles " + ", ".join(str(message.get("role")) for message in messages)
