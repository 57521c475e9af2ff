"""Render chat templates as transformers does.

A template is a program that comes with a model. It runs in Jinja's immutable sandbox, with the settings, filters and
functions that templates on the Hugging Face hub rely on (transformers, `utils/chat_template_utils.py`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from functools import cache
from typing import Any

from slurm_rlhf.errors import ModelError


class ChatTemplate:
    """Render messages with one template; `special` maps names such as bos_token, which templates use, to tokens."""

    def __init__(self, source: str, special: dict[str, str], file: str) -> None:
        """`file`: where the template stands."""
        self.source = source
        self.special = special
        self.file = file
        self._compiled: Any = None

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        where: str,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[dict[str, Any]] = (),
    ) -> str:
        """Return the messages as text; with `add_generation_prompt` the header of the next answer ends it.

        `tools`: the schemas of those that the model may call.

        Raises ModelError, naming `where`, when the template does not compile or refuses the messages.
        """
        try:
            self._compiled = self._compiled or _environment().from_string(self.source)
            rendered = self._compiled.render(
                **self.special,
                messages=list(messages),
                add_generation_prompt=add_generation_prompt,
                tools=list(tools) or None,
                documents=None,  # templates test `is not none`, which is true for undefined names
            )
        except Exception as error:
            kind = "" if type(error).__module__.startswith("jinja2") else f"{type(error).__name__}: "
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise ModelError(
                f"{where}: the chat template in {self.file} failed on messages with roles {roles}: {kind}{error}"
            ) from error
        return str(rendered)


@cache
def _environment() -> Any:
    from jinja2 import nodes
    from jinja2.exceptions import TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """Accept `{% generation %}`, which marks the assistant's words for training and renders its contents."""

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
