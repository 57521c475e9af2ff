"""Reads the calls of tools in what the policy has sampled, in the format in which its chat template writes them.

A tokenizer that has a `response_template` is read by it. For others the format is the first in `formats.toml` that
reads back a call which the chat template has written. Where none does, that is an error at the start: a reader that
does not fit would find no calls, without a word.

`TurnTokens` makes the tokens of an episode: its prompt, and what stands between two turns that the policy has sampled.
Sampled tokens are never encoded again. The next prompt is the one before, the sampled tokens, and the tokens of a
suffix: what the chat template puts behind an answer when messages follow, which is the difference of two renderings of
a conversation made up for it.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from itertools import accumulate
from typing import Any

from slurm_rlhf.data.tokenizer import ANSWER, Tokenizer, encode_prompts, end_tokens, ids_behind
from slurm_rlhf.environments import _transformers
from slurm_rlhf.environments.records import Messages, ToolCall
from slurm_rlhf.errors import ModelError

Schemas = Sequence[dict[str, Any]]
Read = Callable[[str, Schemas], list[ToolCall]]
"""Reads the calls in a response, special tokens included; the schemas are those of the tools."""

END_OF_THINKING = "</think>"
DEEPEST = 100
"""Levels of nesting of a call at most."""
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
        """Read the calls behind the thinking; one that is broken has an error in place of arguments."""
        text = text.rpartition(END_OF_THINKING)[2]
        matches = list(self.call.finditer(text))
        found = [call for match in matches for call in self._calls(match.groupdict(), schemas)]
        broken = len(self.mark.findall(text)) - len(matches)
        return found + [ToolCall("", error="the call is not complete, or not in the format of calls")] * broken

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

    def message(self, content: str, calls: Sequence[ToolCall]) -> dict[str, Any]:
        """Make the assistant's message with calls, numbered as `answers` does."""
        message = written(content, calls)
        for place, made in enumerate(message["tool_calls"]):
            made["id"] = f"call{place:05d}"
            if self.as_text:
                made["function"]["arguments"] = json.dumps(made["function"]["arguments"])
        return message


def written(text: str, calls: Sequence[ToolCall]) -> dict[str, Any]:
    """Make the message of a turn as rewards get it: all that the policy wrote, and the calls in it."""
    made = [{"type": "function", "function": {"name": call.name, "arguments": call.arguments}} for call in calls]
    return {"role": "assistant", "content": text} | ({"tool_calls": made} if made else {})


def answers(messages: Messages) -> Messages:
    """Number the messages of tools by the calls that they answer."""
    return [{**message, "tool_call_id": f"call{place:05d}"} for place, message in enumerate(messages)]


def tool_reader(tokenizer: Tokenizer) -> ToolReader:
    """Find how the model's chat template writes calls.

    Raises ModelError where the template has no room for tools, and where nothing reads back what it has written.
    """
    where = str(tokenizer.directory)
    asked = tokenizer.chat([QUESTION], tools=[PROBE_SCHEMA])
    if PROBE.name not in asked:
        raise ModelError(
            f"the chat template of {where} does not show tools to the model: use a model whose template does (most "
            "instruct models of today), or an environment with step(messages)"
        )
    why = ""
    for as_text in (False, True):
        reader = ToolReader("", lambda text, schemas: [], as_text)
        try:
            whole = tokenizer.chat([QUESTION, reader.message("", [PROBE])], tools=[PROBE_SCHEMA], answer=False)
        except ModelError as error:
            why = why or str(error)
            continue
        written = without_end(_behind(asked, whole), tokenizer)
        for name, read in _readers(tokenizer, asked):
            if (found := read(written, [PROBE_SCHEMA])) == [PROBE]:
                return ToolReader(name, read, as_text)
            why = why or "".join(call.error for call in found)
        why = why or f"it writes {written!r}, in which none of the known formats finds the call"
    raise ModelError(
        f"calls of tools cannot be read for the chat template of {where}: {why}. Give the tokenizer a "
        "response_template (transformers, `tokenizer.parse_response`), or use a model with one of the formats "
        f"{', '.join(one.name for one in formats())}"
    )


def _behind(asked: str, whole: str) -> str:
    """Return what follows the question; its answer may begin otherwise than a prompt for one ends."""
    return whole[
        next((at for at, pair in enumerate(zip(asked, whole, strict=False)) if pair[0] != pair[1]), len(asked)) :
    ]


def without_end(text: str, tokenizer: Tokenizer) -> str:
    """Cut a turn at the token that ends it."""
    ends = (tokenizer.decode([token], skip_special_tokens=False) for token in end_tokens(tokenizer))
    return text[: max((at for end in ends if (at := text.rfind(end)) >= 0), default=len(text))]


def _readers(tokenizer: Tokenizer, prompt: str) -> Iterator[tuple[str, Read]]:
    if template := tokenizer.response_template:

        def read(text: str, schemas: Schemas) -> list[ToolCall]:
            try:
                message = _transformers.parsed_response(text, template, prompt, schemas)
                calls = _from_json(json.dumps(message.get("tool_calls") or []))
            except (ValueError, KeyError, RecursionError) as error:
                return [ToolCall("", error=f"the call cannot be read: {error}")]
            return [_call_of(one) for one in calls]

        yield "response_template", read
        return
    for one in formats():
        yield one.name, one.read


THOUGHT = "<think>\nslurm-rlhf-thought\n</think>\n\n"
QUESTION = {"role": "user", "content": "?"}


class TurnTokens:
    """Makes the tokens between turns with one model's tokenizer, and its chat template where `templated`."""

    def __init__(self, tokenizer: Tokenizer, templated: bool, reader: ToolReader | None = None) -> None:
        """Check the chat template; `reader` reads calls of tools, None: the environments have none.

        Raises ModelError for a template that changes earlier messages, or strips their thinking, when others follow.
        """
        self.tokenizer, self.templated, self.reader = tokenizer, templated, reader
        if not templated:
            return
        answer = tokenizer.chat([QUESTION, {"role": "assistant", "content": THOUGHT + ANSWER}], answer=False)
        _, there, self._end = answer.rpartition(ANSWER)
        if not there or (reader is None and THOUGHT.strip() not in answer):
            raise self._changes()
        if reader is None:
            self.suffix([QUESTION])
        elif ANSWER not in self.suffix(
            [{"role": "tool", "name": PROBE.name, "content": ANSWER}], [PROBE], [PROBE_SCHEMA]
        ):
            raise ModelError(
                f"the chat template of {tokenizer.directory} does not show the model what tools answer: use a model "
                "whose template does, or an environment with step(messages)"
            )

    def prompt(self, messages: Messages, tools: Schemas = (), where: str = "") -> list[int]:
        """Encode the prompt of an episode. Raises ModelError."""
        text = self.tokenizer.chat(messages, where, tools=tools) if self.templated else str(messages[-1]["content"])
        return encode_prompts([text], self.tokenizer, self.templated)[0]

    def behind(
        self, before: Sequence[int], messages: Messages, calls: Sequence[ToolCall] = (), tools: Schemas = ()
    ) -> list[int]:
        """Encode `messages` behind the tokens so far, whose last are a sampled turn, up to where the next turn starts.

        `calls`: the calls in that turn, which the messages answer; `tools`: what the prompt was made with.
        """
        if not self.templated:
            return self.text_behind(before, str(messages[-1]["content"]))
        ids = self.text_behind(before, self.suffix(messages, calls, tools))
        # The template ends the answer with a token that the policy has sampled, unless it was cut off.
        return ids[1:] if ids[:1] == list(before[-1:]) else ids

    def text_behind(self, before: Sequence[int], text: str) -> list[int]:
        """Encode a text as it is behind the tokens so far."""
        return ids_behind(list(before), text, self.tokenizer)

    def suffix(self, messages: Messages, calls: Sequence[ToolCall] = (), tools: Schemas = ()) -> str:
        """Return what the chat template puts behind an answer: its end, the messages, and the next turn's start.

        Raises ModelError where it changes what stands before.
        """
        answer = {"role": "assistant", "content": THOUGHT + ANSWER}
        if calls and self.reader:
            answer = self.reader.message(answer["content"], calls)
        one = self.tokenizer.chat([QUESTION, answer], tools=tools, answer=False)
        more = self.tokenizer.chat([QUESTION, answer, *(answers(messages) if calls else messages)], tools=tools)
        if calls and not one.endswith(self._end):
            kept = without_end(one, self.tokenizer)
        else:
            kept = one.removesuffix(self._end)
        if not more.startswith(kept) or (calls and kept == one):
            raise self._changes()
        return more[len(kept) :]

    def _changes(self) -> ModelError:
        return ModelError(
            f"the chat template of {self.tokenizer.directory} changes earlier messages when others follow (it strips "
            "the thinking of earlier turns, say), so that an episode of several turns cannot keep the tokens that were "
            "sampled: use a model whose template does not, or a copy of its directory with a chat_template.jinja that "
            "writes every message as if it were the last"
        )
