"""Reads the calls of tools in what the policy has sampled, in the format in which its chat template writes them.

A tokenizer that has a `response_template` is read by it. For others the format is the first in `formats.toml` that
reads back a call which the chat template has written. Where none does, that is an error at the start: a reader that
does not fit would find no calls, without a word.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib import resources
from itertools import accumulate, takewhile
from typing import Any

from slurm_rlhf.data.tokenizer import Tokenizer, end_tokens
from slurm_rlhf.environments import _transformers
from slurm_rlhf.environments.records import Messages, ToolCall
from slurm_rlhf.errors import ModelError

Schemas = Sequence[dict[str, Any]]
Read = Callable[[str, Schemas], list[ToolCall]]
"""Reads the calls in a response, special tokens included; the schemas are those of the tools."""

THINKING, END_OF_THINKING = "<think>", "</think>"
DEEPEST = 100
"""Most levels of nesting in a call."""
_STRINGS = re.compile(r'"(?:\\.|[^"\\])*+"?', re.DOTALL)
PROBE = ToolCall("look_up", {"text": "slurm-rlhf", "count": 7})
PROBE_SCHEMA: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": PROBE.name,
        "description": "Looks a text up.",
        "parameters": {
            "type": "object",
            "properties": {
                "text": {"type": "string", "description": "The text."},
                "count": {"type": "integer", "description": "How often."},
            },
            "required": ["text", "count"],
        },
    },
}


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """Reads one format of `formats.toml`."""

    name: str
    call: re.Pattern[str]
    mark: re.Pattern[str]
    pair: re.Pattern[str] | None

    def read(self, text: str, schemas: Schemas) -> list[ToolCall]:
        """Read the calls after the thinking; one that is broken has an error in place of arguments."""
        text = text.rpartition(END_OF_THINKING)[2]
        matches = list(self.call.finditer(text))
        found = [call for match in matches for call in self._calls(match.groupdict(), schemas)]
        broken = len(self.mark.findall(text)) - len(matches)
        return found + [ToolCall("", error="the call is not complete, or not in the format of calls")] * broken

    def outside(self, text: str, special: re.Pattern[str], opened: str) -> dict[str, Any]:
        """Return what stands outside calls and `special` tokens, thoughts apart, as transformers' `parse_response`."""
        before, _, behind = (opened + text).rpartition(END_OF_THINKING)
        behind, _, unfinished = behind.partition(THINKING)
        content = special.sub("", self.call.sub("", behind)).strip()
        return {"content": content, "reasoning_content": f"{before}{unfinished}".replace(THINKING, "").strip()}

    def _calls(self, groups: Mapping[str, str | None], schemas: Schemas) -> Iterator[ToolCall]:
        name, arguments = (groups.get("name") or "").strip(), groups.get("arguments") or "{}"
        try:
            if self.pair is not None:
                yield ToolCall(name, self._pairs(name, arguments, schemas))
                return
            given = _from_json(groups.get("json") or arguments)
        except ValueError as error:
            yield ToolCall(name, error=f"the call is not valid JSON: {error}")
            return
        for one in given if isinstance(given, list) else [given]:
            yield ToolCall(name, one) if name and isinstance(one, dict) else _call_of(one)

    def _pairs(self, name: str, text: str, schemas: Schemas) -> dict[str, Any]:
        assert self.pair is not None
        known = {schema["function"]["name"]: schema["function"]["parameters"] for schema in schemas}
        types = {key: value.get("type") for key, value in known.get(name, {}).get("properties", {}).items()}
        found = {match["key"].strip(): match["value"] for match in self.pair.finditer(text)}
        return {key: value if types.get(key, "string") == "string" else _typed(value) for key, value in found.items()}


def _call_of(one: Any) -> ToolCall:
    """Read an object with name and arguments; the arguments may be JSON as text."""
    one = one.get("function", one) if isinstance(one, dict) and isinstance(one.get("function"), dict) else one
    if not isinstance(one, dict):
        return ToolCall("", error=f"a call is an object with name and arguments, not {json.dumps(one)}")
    name, given = (one.get(key, one.get(other)) for key, other in (("name", "tool_name"), ("arguments", "parameters")))
    given = _typed(given) if isinstance(given, str) else {} if given is None else given
    if not isinstance(name, str) or not isinstance(given, dict):
        return ToolCall(str(name or ""), error="a call has a name, and an object of arguments")
    return ToolCall(name, given)


def _from_json(text: str) -> Any:
    """Read JSON. Raises ValueError, also for what is nested too deeply for Python's readers and writers of JSON."""
    open_ones = accumulate((char in "[{") - (char in "]}") for char in _STRINGS.sub("", text))
    if max(open_ones, default=0) > DEEPEST:
        raise ValueError(f"it is nested more than {DEEPEST} deep")
    return json.loads(text)


def _typed(value: str) -> Any:
    try:
        return _from_json(value)
    except ValueError:
        return value  # the check of the arguments says what was expected


@cache
def formats() -> tuple[ToolFormat, ...]:
    """Return the known formats in their order."""
    tables = tomllib.loads((resources.files(__package__) / "formats.toml").read_text(encoding="utf-8"))
    made = {name: {key: re.compile(value, re.DOTALL) for key, value in table.items()} for name, table in tables.items()}
    return tuple(ToolFormat(name, one["call"], one["mark"], one.get("pair")) for name, one in made.items())


@dataclass(frozen=True, slots=True)
class ToolReader:
    """Reads the calls of one model, and writes calls as its chat template takes them."""

    name: str  # name of the format
    read: Read
    as_text: bool  # the template takes arguments as JSON text
    outside: Callable[[str], dict[str, Any]] = lambda text: {}  # reads the text outside calls into fields of a message
    cut: Callable[[str], str] = str  # turn with its special tokens -> text that `read` and `outside` take

    def written(self, text: str, plain: str, calls: Sequence[ToolCall]) -> dict[str, Any]:
        """Make the message of a turn as TRL's rewards get it; its content is `plain` where a call is broken."""
        sound = [{"name": one.name, "arguments": one.arguments} for one in calls if not one.error]
        found = self.outside(text) if len(sound) == len(calls) else {"content": plain}
        found = {**found, "tool_calls": [{"type": "function", "function": one} for one in sound]}
        return {"role": "assistant", "content": "", **{name: value for name, value in found.items() if value}}

    def message(self, content: str, calls: Sequence[ToolCall]) -> dict[str, Any]:
        """Make the assistant's message with calls, numbered as `answers` does."""
        taken: Callable[[dict[str, Any]], Any] = json.dumps if self.as_text else dict
        made = [
            {
                "type": "function",
                "id": f"call{place:05d}",
                "function": {"name": call.name, "arguments": taken(call.arguments)},
            }
            for place, call in enumerate(calls)
        ]
        return {"role": "assistant", "content": content, "tool_calls": made}


def answers(messages: Messages) -> Messages:
    """Number the messages of tools by the calls that they answer."""
    return [{**message, "tool_call_id": f"call{place:05d}"} for place, message in enumerate(messages)]


def tool_reader(tokenizer: Tokenizer) -> ToolReader:
    """Find how the model's chat template writes calls.

    Raises ModelError where the template has no room for tools, and where nothing reads back what it has written.
    """
    where, question = str(tokenizer.directory), [{"role": "user", "content": "?"}]
    asked = tokenizer.chat(question, tools=[PROBE_SCHEMA])
    if PROBE.name not in asked:
        raise ModelError(
            f"the chat template of {where} does not show tools to the model: use a model whose template does (most "
            "instruct models of today), or an environment with step(messages)"
        )
    why = ""
    for as_text in (False, True):
        reader = ToolReader("", lambda text, schemas: [], as_text)
        try:
            whole = tokenizer.chat([*question, reader.message("", [PROBE])], tools=[PROBE_SCHEMA], answer=False)
        except ModelError as error:
            why = why or str(error)
            continue
        # The answer may begin otherwise than a prompt for one ends.
        same = takewhile(lambda pair: pair[0] == pair[1], zip(asked, whole, strict=False))
        written = whole[len([*same]) :]
        for one in _readers(tokenizer, asked, as_text):
            if (found := one.read(one.cut(written), [PROBE_SCHEMA])) == [PROBE]:
                return one
            why = why or "".join(call.error for call in found)
        why = why or f"it writes {without_end(written, tokenizer)!r}, in which none of the known formats finds the call"
    raise ModelError(
        f"calls of tools cannot be read for the chat template of {where}: {why}. Give the tokenizer a "
        "response_template (transformers, `tokenizer.parse_response`), or use a model with one of the formats "
        f"{', '.join(one.name for one in formats())}"
    )


def without_end(text: str, tokenizer: Tokenizer) -> str:
    """Cut a turn at the token that ends it."""
    ends = (tokenizer.decode([token], skip_special_tokens=False) for token in end_tokens(tokenizer))
    return text[: max((at for end in ends if (at := text.rfind(end)) >= 0), default=len(text))]


def _readers(tokenizer: Tokenizer, prompt: str, as_text: bool) -> Iterator[ToolReader]:
    if template := tokenizer.response_template:

        def read(text: str, schemas: Schemas) -> list[ToolCall]:
            try:
                message = _transformers.parsed_response(text, template, prompt, schemas)
                calls = _from_json(json.dumps(message.get("tool_calls") or []))
            except (ValueError, KeyError, RecursionError) as error:
                return [ToolCall("", error=f"the call cannot be read: {error}")]
            return [_call_of(one) for one in calls]

        outside = partial(_transformers.parsed_response, template=template, prompt=prompt, tools=())
        yield ToolReader("response_template", read, as_text, outside, str)
        return
    words = [token.content for token in tokenizer.backend.get_added_tokens_decoder().values() if token.special]
    special = re.compile("|".join(map(re.escape, words)))
    opened = THINKING if prompt.rstrip().endswith(THINKING) else ""
    for one in formats():
        outside = partial(one.outside, special=special, opened=opened)
        yield ToolReader(one.name, one.read, as_text, outside, partial(without_end, tokenizer=tokenizer))
