"""Records that travel between an episode and its environment, which lives in another process."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

Messages = list[dict[str, Any]]


class ToolCall(Struct, forbid_unknown_fields=True):
    """Holds a call of a tool, as the policy wrote it."""

    name: str
    arguments: dict[str, Any] = {}
    error: str = ""  # why its text cannot be read; empty: it can


class Start(Struct, forbid_unknown_fields=True):
    """Begins an episode."""

    row: dict[str, Any]
    label: Any
    messages: Messages  # made of the row's prompt
    text: str  # the prompt as the data make it, chat template included
    sampling: dict[str, Any] = {}  # how turns are sampled: temperature, top_p, top_k, stop; max_tokens of each turn
    max_len: int = 0  # most tokens of an episode
    model: str = ""  # directory of the policy's tokenizer


class Begun(Struct, forbid_unknown_fields=True):
    """Answers `Start`."""

    messages: Messages | None = None  # the whole prompt; None: that of the data
    text: str | None = None  # the whole prompt as text, which gets no chat template
    ids: list[int] | None = None  # the whole prompt as tokens
    limit: int | None = None  # most tokens of the turn; None: as many as any turn
    name: str = ""  # the environment of the row, as `Instances.describe` names it


class Turn(Struct, forbid_unknown_fields=True):
    """Tells what the policy has sampled."""

    text: str
    calls: list[ToolCall] = []
    ids: list[int] = []
    finish_reason: str = ""
    message: dict[str, Any] = {}  # the turn as TRL's rewards get it


class Answer(Struct, forbid_unknown_fields=True):
    """Answers a turn, or the end of an episode."""

    messages: Messages | None = None  # observation; None: there is none
    text: str | None = None  # observation that gets no chat template
    ids: list[int] | None = None  # observation as tokens
    limit: int | None = None  # most tokens of the next turn; None: as many as any turn
    reward: float = 0.0
    done: bool = False
    score: float | None = None  # by the task's own measure; None: the environment gives none
    logs: dict[str, float] = {}  # name -> value to be averaged and logged
    counts: dict[str, int] = {}  # `CALLS` and the kinds of errors of tools -> how many


class EnvironmentInfo(Struct, forbid_unknown_fields=True):
    """Describes an environment."""

    kind: str  # a key of `kinds.KINDS`
    schemas: list[dict[str, Any]] = []  # its tools
    columns: list[str] = []  # columns that each of its rows must have
    rewards: bool = True  # it gives rewards


CALLS = "calls"
UNREADABLE, UNKNOWN, ARGUMENTS, RAISED = "unreadable", "unknown", "arguments", "raised"
ERRORS = (UNREADABLE, UNKNOWN, ARGUMENTS, RAISED)
"""Kinds of errors of tools: text that is no call, a tool that is not there, arguments that do not fit its type hints,
an exception in it. The policy gets each as an observation."""
