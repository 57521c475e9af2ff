"""Plays the class of OpenRLHF's agent file whose `execute` asks the engine itself: each of its asks is a turn.

`execute` is a coroutine on a loop that runs only while the episode waits for it: until it asks, or returns.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import defaultdict
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from slurm_rlhf.environments._transformers import hf_tokenizer
from slurm_rlhf.environments.records import Answer, Begun, Start, Turn
from slurm_rlhf.environments.user_class import UserClass
from slurm_rlhf.errors import EpisodeError

EXECUTOR = "executor"
"""Name of the convention."""
_CUT_OFF = "length"


class Ask(NamedTuple):
    """Holds what `execute` asks of the engine, and waits for the tokens."""

    ids: list[int]
    sampling: Any  # an object with the fields of vLLM's SamplingParams
    answer: Future[Any]


class LlmEngine:
    """Stands for the engine that `execute` gets; a server in a thread of the agent's may ask it, too."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.asks: asyncio.Queue[Ask | None] = asyncio.Queue()
        """Asks of the episode; None: `execute` has ended."""

    async def generate(self, prompt_token_ids: Any, sampling_params: Any = None, multi_modal_data: Any = None) -> Any:
        """Wait for a turn of the policy after `prompt_token_ids`; return it as vLLM's RequestOutput has it."""
        if multi_modal_data:
            raise EpisodeError("multi_modal_data: models see no images here")
        if (limit := getattr(sampling_params, "max_tokens", None)) is not None and limit < 1:
            raise EpisodeError(f"max_tokens = {limit}: ask for one token at least")
        ask = Ask([int(token) for token in prompt_token_ids], sampling_params, Future())
        self._loop.call_soon_threadsafe(self.asks.put_nowait, ask)
        return await asyncio.wrap_future(ask.answer)


class ExecutorEnvironment(UserClass):
    """Plays one episode after the other with an executor, which may keep a server from one to the next."""

    def __init__(self, made: type, file: Path) -> None:
        super().__init__(made, file)
        self.call("__init__")
        self._name = f"{made.__name__}.execute"
        self._engine = LlmEngine(self.loop)
        self._task: asyncio.Task[Any] | None = None
        self._ask: Ask | None = None

    def begin(self, start: Start) -> Begun:
        self._sampling = start.sampling
        self._ids: list[int] = []  # tokens so far: those that `execute` gave the engine, and those that were sampled
        self._ranges: list[tuple[int, int]] = []  # first and end of each answer in `_ids`
        asks: asyncio.Queue[Ask | None] = asyncio.Queue()
        self._engine.asks = asks
        given: dict[str, Any] = {
            "prompt": start.text,
            "label": start.label,
            "sampling_params": SimpleNamespace(**start.sampling, logprobs=None),
            "max_length": start.max_len,
            "hf_tokenizer": self.run(f"reading the tokenizer of {start.model}", lambda: hf_tokenizer(start.model)),
            "llm_engine": self._engine,
        }
        if "images" in inspect.signature(self.instance.execute).parameters:
            given["images"] = None
        self._task = self.loop.create_task(self._execute(given))
        self._task.add_done_callback(lambda task: asks.put_nowait(None))
        answer = self._next()
        if answer.done:
            raise EpisodeError(f"{self.file}: {self._name} has not asked llm_engine.generate for any token")
        return Begun(ids=answer.ids, limit=answer.limit)

    def turn(self, turn: Turn) -> Answer:
        return self._sampled(turn.ids, turn.text, turn.finish_reason)

    def end(self) -> Answer:
        if self._task is None or self._task.done():
            return Answer()
        answer = self._sampled([], "", _CUT_OFF)  # no turn is left; `execute` may still say what it was worth
        if not answer.done:
            raise EpisodeError(
                f"{self.file}: {self._name} asks for more after an answer of no tokens (finish_reason {_CUT_OFF}), "
                "which ends an episode at env.max_turns, env.max_seconds or data.max_len: have it return there"
            )
        return answer

    def leave(self) -> None:
        with suppress(EpisodeError, asyncio.InvalidStateError):  # it has cancelled its last ask
            self.end()
        if self._task is not None and not self._task.done():
            self._task.cancel()
            if self._ask is not None:
                self._ask.answer.cancel()
            with suppress(Exception, asyncio.CancelledError):
                self.loop.run_until_complete(self._task)
        _IDLE[self.made].append(self)

    async def _execute(self, given: dict[str, Any]) -> Any:
        return await self.instance.execute(**given)

    def _sampled(self, ids: list[int], text: str, reason: str) -> Answer:
        assert self._ask is not None
        output = SimpleNamespace(index=0, token_ids=list(ids), text=text, finish_reason=reason, logprobs=None)
        request = SimpleNamespace(prompt_token_ids=list(self._ids), outputs=[output], finished=True)
        self._ranges += [(len(self._ids), len(self._ids) + len(ids))] if ids else []
        self._ids += ids
        self._ask.answer.set_result(request)
        return self._next()

    def _next(self) -> Answer:
        """Let `execute` go on to its next ask, or to its end."""
        assert self._task is not None
        self._ask = self.run(self._name, self._engine.asks.get)
        if self._ask is None or self._task.done():
            return self._ended(self.run(self._name, self._task.result))
        ids, before, sampling = self._ask.ids, self._ids, self._ask.sampling
        if ids[: len(before)] != before:
            raise EpisodeError(
                f"{self.file}: {self._name} asks the engine to go on after {len(ids)} tokens that do not begin with "
                f"the {len(before)} so far: an episode is one sequence, so ask again when the answer is there, and "
                "after its token_ids as they are, never encoded again"
            )
        for name, own in self._sampling.items():
            if name in ("temperature", "top_p") and getattr(sampling, name, own) != own:
                raise EpisodeError(
                    f"{self.file}: {self._name} asks for {name} = {getattr(sampling, name)}; the run samples with "
                    f"rollout.{name} = {own} in every turn: use sampling_params as they are, or set the key"
                )
        self._ids = list(ids)
        return Answer(ids=ids[len(before) :], limit=getattr(sampling, "max_tokens", None))

    def _ended(self, found: Any) -> Answer:
        try:
            ids = [int(token) for token in found["observation_tokens"]]
            ranges = [(int(first), int(end)) for first, end in found["action_ranges"] if first < end]
        except (KeyError, TypeError, ValueError):
            raise self.wrong("execute", found, "a dict with observation_tokens and action_ranges") from None
        if ids[: len(self._ids)] != self._ids or ranges != self._ranges:
            raise EpisodeError(
                f"{self.file}: {self._name} returned observation_tokens or action_ranges ({ranges}) that are not those "
                f"of its asks and their answers ({len(self._ids)} tokens, sampled at {self._ranges})"
            )
        reward = found.get("reward")
        answer = self.scored("execute", found, 0.0 if reward is None else self.number("execute", reward))
        answer.done = True
        return answer


_IDLE: defaultdict[type, list[ExecutorEnvironment]] = defaultdict(list)


def executor_of(made: type, file: Path) -> ExecutorEnvironment:
    """Return an executor that plays no episode now, or make one."""
    return _IDLE[made].pop() if _IDLE[made] else ExecutorEnvironment(made, file)
