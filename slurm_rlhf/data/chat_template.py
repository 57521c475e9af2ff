"""Render messages with a model's chat template, as transformers does, but without it.

A template is a program that comes with a model: it runs in Jinja's immutable sandbox, with the settings, filters and
functions that templates on the Hugging Face hub rely on (transformers, `utils/chat_template_utils.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from datetime import datetime
from functools import cache
from typing import Any

from slurm_rlhf.errors import ModelError


class ChatTemplate:
    """Render messages with one template; `special` maps names such as bos_token, which templates use, to tokens."""

    def __init__(self, source: str, special: dict[str, str], file: str) -> None:
        """`file`: the file with the template, for messages."""
        self.source = source
        self.special = special
        self.file = file
        self._compiled: dict[bool, Any] = {}

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        where: str,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[dict[str, Any]] = (),
    ) -> str:
        """Return the messages as text; with `add_generation_prompt` the header of the next answer ends it.

        `tools`: the schemas of the tools that the model may call.

        Raises ModelError, naming `where`, when the template does not compile or refuses the messages.
        """
        return self._rendered(messages, where, add_generation_prompt, tools, marked=False)

    def marks(self, messages: Sequence[dict[str, Any]], where: str, tools: Sequence[dict[str, Any]] = ()) -> list[str]:
        """Return the text of `render` in parts; parts 1, 3, ... are those between `{% generation %}` marks."""
        return _MARK.split(self._rendered(messages, where, False, tools, marked=True))

    @property
    def has_marks(self) -> bool:
        """Tell whether `{% generation %}` says which words are the assistant's."""
        return re.search(r"\{%[-+]?\s*generation\s*[-+]?%\}", self.source) is not None

    def _rendered(
        self,
        messages: Sequence[dict[str, Any]],
        where: str,
        add_generation_prompt: bool,
        tools: Sequence[dict[str, Any]],
        marked: bool,
    ) -> str:
        try:
            if marked not in self._compiled:
                self._compiled[marked] = _environment(marked).from_string(self.source)
            rendered = self._compiled[marked].render(
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


_START, _END = "\ufdd0", "\ufdd1"
"""Noncharacters of Unicode, which no text holds; they take the place of a template's marks."""
_MARK = re.compile(f"[{_START}{_END}]")


@cache
def _environment(marked: bool) -> Any:
    """Make the Jinja environment; `marked`: templates write `_START` and `_END` at `{% generation %}` marks."""
    from jinja2 import nodes
    from jinja2.exceptions import TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """Accept `{% generation %}`, which marks the assistant's words for training and renders its contents."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            scope = nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)
            start, end = (nodes.Output([nodes.TemplateData(mark)], lineno=line) for mark in (_START, _END))
            return [start, scope, end] if marked else scope

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
