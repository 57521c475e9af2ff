"""Runs environments, which answer the policy between its turns, and makes one trajectory of all turns of an episode.

A plain prompt is the environment with one turn. Sampled tokens are never encoded again: the next turn goes on behind
the prompt, what was sampled, and the tokens of the observation, which the action mask leaves out of training.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from msgspec.structs import replace

from slurm_rlhf.config.schema import Config
from slurm_rlhf.data.prompts import prompt_messages
from slurm_rlhf.data.tokenizer import Tokenizer, encode_prompts, ids_behind, observation_text
from slurm_rlhf.errors import EpisodeError, cut
from slurm_rlhf.polling import in_thread
from slurm_rlhf.records import F32, I32, LENGTH, REPETITION, Bool, Prompt, Sampling, Trajectory, VersionSpan
from slurm_rlhf.rewards.model import printed_to
from slurm_rlhf.user_files import line_of, run_file, text_of

KEY = "env.path"
CLASS = "Environment"

Messages = list[dict[str, Any]]


class Environment(Protocol):
    """Declares what the class `Environment` in the user's file has. Each episode has an instance of its own."""

    def reset(self, row: dict[str, Any]) -> Messages | str | None:
        """Begin an episode with a row of the data; return its prompt, or None for the one that the data makes."""

    def step(self, messages: Messages) -> tuple[Messages | str | None, float, bool]:
        """Take the messages so far, the policy's answer last; return observation, reward, and whether it is over."""


class Episode:
    """Plays a prompt without an environment: one turn is the whole episode."""

    def __init__(self, prompt: Prompt, sampling: Sampling) -> None:
        self.token_ids: I32 = prompt.token_ids
        """Tokens that the turn goes on behind, [P]."""
        self.limit = sampling.max_new_tokens
        """Most tokens that the turn may sample."""

    async def start(self) -> None:
        """Prepare the first turn."""

    async def take(self, found: Trajectory) -> Trajectory | None:
        """Take the response of a turn; return the whole episode if it is over."""
        return found


class Environments:
    """Makes the episodes of a run with the class in the user's file. Its code runs in threads, one for each call."""

    def __init__(self, config: Config, tokenizer: Tokenizer, printed: Path | None = None) -> None:
        """`printed`: the file for what the class prints; None: it is printed as usual.

        Raises EpisodeError for a file without a usable class, ModelError for a chat template without room for turns.
        """
        self.file, self.config, self.tokenizer = Path(config.env.path), config, tokenizer
        self._data, self._printed = config.data, printed
        self.templated = config.data.apply_chat_template
        self.made = self._class()
        if self.templated:
            observation_text([{"role": "user", "content": "?"}], tokenizer)

    def begin(self, prompt: Prompt, sampling: Sampling) -> Episode:
        """Begin an episode."""
        return Turns(self, prompt, sampling)

    async def call(self, name: str, work: Callable[[], Any]) -> Any:
        """Run `work`, which calls the user's `name`, in a thread. Raises EpisodeError."""
        try:
            return await asyncio.wait_for(
                asyncio.wrap_future(in_thread(work, "environment")), self.config.timeout.reward
            )
        except TimeoutError:
            seconds = self.config.timeout.reward
            raise EpisodeError(
                f"{self.file}: {CLASS}.{name} did not return within {seconds:g} s; make it faster or raise "
                "timeout.reward"
            ) from None

    def own(self, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call the user's function, in this thread. Raises EpisodeError with file and line."""
        with printed_to(self._printed) if self._printed else nullcontext():
            try:
                return function(*arguments)
            except (Exception, SystemExit) as error:
                raise EpisodeError(f"{line_of(self.file, error)}: {CLASS}.{name} raised {text_of(error)}") from error

    def prompt_of(self, given: Any, prompt: Prompt) -> tuple[Messages, I32]:
        """Return the messages and the tokens of what `reset` has returned. Raises EpisodeError."""
        if given is None:
            if self._data.input_key not in prompt.row:  # an evaluation may have a column of another name
                return [{"role": "user", "content": prompt.text}], prompt.token_ids
            return prompt_messages(prompt.row, self._data), prompt.token_ids
        messages = self._messages(given, "reset")
        text = self.tokenizer.chat(messages, str(self.file)) if self.templated else messages[0]["content"]
        (ids,) = encode_prompts([text], self.tokenizer, self.templated)
        longest = self._data.max_len - self.config.rollout.max_new_tokens
        if not 0 < len(ids) <= longest:
            raise EpisodeError(
                f"{self.file}: {CLASS}.reset returned a prompt of {len(ids)} tokens, and 1 to {longest} fit "
                f"(data.max_len - rollout.max_new_tokens): {cut(text, 80)!r}"
            )
        return messages, np.array(ids, dtype=np.int32)

    def observed(self, answer: Any) -> tuple[Messages, float, bool]:
        """Read what `step` has returned. Raises EpisodeError."""
        if not isinstance(answer, tuple) or len(answer) != 3:
            raise EpisodeError(f"{self.file}: {CLASS}.step returned {cut(repr(answer), 80)}; {_ANSWER}")
        observation, reward, done = answer
        if isinstance(reward, bool | int | float | np.floating) and math.isfinite(reward):
            messages = [] if done and observation is None else self._messages(observation, "step")
            return messages, float(reward), bool(done)
        raise EpisodeError(f"{self.file}: {CLASS}.step returned the reward {cut(repr(reward), 80)}; {_ANSWER}")

    def tokens_of(self, observation: Messages, before: I32) -> list[int]:
        """Return the tokens of an observation behind those of the episode so far, up to where the next turn starts."""
        if not self.templated:
            return ids_behind(before.tolist(), observation[0]["content"], self.tokenizer)
        ids = ids_behind(before.tolist(), observation_text(observation, self.tokenizer), self.tokenizer)
        # The template ends the answer with a token that the policy has sampled, unless it was cut off.
        return ids[1:] if ids[:1] == before[-1:].tolist() else ids

    def _messages(self, given: Any, name: str) -> Messages:
        if isinstance(given, str):
            return [{"role": "user", "content": given}]
        listed = isinstance(given, list) and given and all(isinstance(one, dict) and "role" in one for one in given)
        if self.templated and listed:
            return [dict(one) for one in given]
        needed = "a string or a list of messages" if self.templated else "a string (data.apply_chat_template is off)"
        raise EpisodeError(f"{self.file}: {CLASS}.{name} returned {cut(repr(given), 80)}; expected {needed}")

    def _class(self) -> Callable[[], Environment]:
        found = getattr(run_file(self.file, KEY, EpisodeError), CLASS, None)
        lacks = [name for name in ("reset", "step") if not callable(getattr(found, name, None))]
        if inspect.isclass(found) and not lacks:
            return found  # type: ignore[return-value]
        what = f"its class {CLASS} has no {' and no '.join(lacks)}" if inspect.isclass(found) else f"no class {CLASS}"
        raise EpisodeError(f"{KEY}: {self.file}: {what}; `slurm-rlhf docs data_and_reward` has an example")


_ANSWER = "expected (observation, reward, done) with a finite number as reward"


class Turns(Episode):
    """Plays an episode with an instance of the user's class."""

    def __init__(self, environments: Environments, prompt: Prompt, sampling: Sampling) -> None:
        super().__init__(prompt, sampling)
        self._environments, self._prompt, self._most = environments, prompt, sampling.max_new_tokens
        self._environment: Environment
        self._messages: Messages = []
        self._ids: list[int] = []  # sampled tokens and tokens of observations, in their order
        self._logprobs: list[float] = []
        self._sampled: list[bool] = []
        self._versions: list[VersionSpan] = []
        self._reward = 0.0
        self._turns = 0

    async def start(self) -> None:
        await self._environments.call("reset", self._reset)

    async def take(self, found: Trajectory) -> Trajectory | None:
        return await self._environments.call("step", partial(self._step, found))

    def _reset(self) -> None:
        own = self._environments.own
        self._environment = own("__init__", self._environments.made)
        given = own("reset", self._environment.reset, copy.deepcopy(self._prompt.row))
        self._messages, self._prompt_ids = self._environments.prompt_of(given, self._prompt)
        self._go_on()

    def _step(self, found: Trajectory) -> Trajectory | None:
        environments, before = self._environments, len(self._ids)
        self._append(found.response_ids.tolist(), found.rollout_logprobs.tolist(), True)
        self._versions += [replace(one, start=one.start + before, end=one.end + before) for one in found.versions]
        self._messages.append({"role": "assistant", "content": found.text})
        answer = environments.own("step", self._environment.step, copy.deepcopy(self._messages))
        observation, reward, done = environments.observed(answer)
        self._reward += reward
        self._turns += 1
        if done or found.finish_reason == REPETITION or self._turns == environments.config.env.max_turns:
            return self._whole(found, found.finish_reason)
        self._go_on()
        ids = environments.tokens_of(observation, self.token_ids)
        if len(self.token_ids) + len(ids) >= environments.config.data.max_len:
            return self._whole(found, LENGTH)
        self._append(ids, [0.0] * len(ids), False)
        if self._versions:
            self._versions[-1] = replace(self._versions[-1], end=len(self._ids))
        self._messages += observation
        self._go_on()
        return None

    def _append(self, ids: list[int], logprobs: list[float], sampled: bool) -> None:
        self._ids += ids
        self._logprobs += logprobs
        self._sampled += [sampled] * len(ids)

    def _go_on(self) -> None:
        self.token_ids = np.concatenate([self._prompt_ids, np.array(self._ids, dtype=np.int32)])
        self.limit = min(self._most, self._environments.config.data.max_len - len(self.token_ids))

    def _whole(self, last: Trajectory, reason: str) -> Trajectory:
        ids: I32 = np.array(self._ids, dtype=np.int32)
        logprobs: F32 = np.array(self._logprobs, dtype=np.float32)
        mask: Bool = np.array(self._sampled, dtype=np.bool_)
        text = last.text
        if self._turns > 1:
            text = self._environments.tokenizer.response_text(self._prompt_ids.tolist(), self._ids)
        return replace(
            last,
            prompt_ids=self._prompt_ids,
            response_ids=ids,
            rollout_logprobs=logprobs,
            action_mask=mask,
            finish_reason=reason,
            text=text,
            versions=self._versions,
            reward=self._reward,
            turns=self._turns,
        )
