"""Plays episodes, and makes one trajectory of all turns of an episode.

A plain prompt is the environment with one turn. With `env.path` the user's environments answer between the turns, in
processes of their own. Sampled tokens are never encoded again: the next turn goes on after the prompt, what was
sampled, and the tokens of the observation, which the action mask leaves out of training.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace as replaced
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from msgspec.structs import replace

from slurm_rlhf.config.roles import has_own_reward, has_teacher
from slurm_rlhf.config.schema import Config
from slurm_rlhf.data.prompts import prompt_messages
from slurm_rlhf.data.tokenizer import Tokenizer
from slurm_rlhf.environments.executor import EXECUTOR
from slurm_rlhf.environments.host import Host, ProcessLost
from slurm_rlhf.environments.kinds import COLUMN
from slurm_rlhf.environments.records import Answer, Begun, EnvironmentInfo, Messages, Start, ToolCall, Turn
from slurm_rlhf.environments.tool_calls import tool_reader
from slurm_rlhf.environments.turn_tokens import TurnTokens
from slurm_rlhf.errors import ConfigError, EpisodeError, ModelError, UserError, cut, meant
from slurm_rlhf.records import I32, LENGTH, LOST, REPETITION, STOP, Bool, Prompt, Sampling, Trajectory, VersionSpan
from slurm_rlhf.workers.pool import WorkerNodes

log = logging.getLogger(__name__)
T = TypeVar("T")

MOST_TRIES = 3
"""Attempts at an episode; one that ends with a process in which another episode was lost does not count."""
FEW_LOST = 8
"""A run ends after this many lost episodes if they are more than half of all: the environment is broken then."""


class Episode:
    """Plays a prompt without an environment: one turn is the whole episode."""

    def __init__(self, prompt: Prompt, sampling: Sampling, sample: int) -> None:
        self.token_ids: I32 = prompt.token_ids
        """Tokens after which the turn is sampled, [P]."""
        self.limit = sampling.max_new_tokens
        """Most tokens that the turn may sample."""

    async def start(self) -> Trajectory | None:
        """Prepare the first turn; return the whole episode if it was lost."""
        return None

    async def take(self, found: Trajectory) -> Trajectory | None:
        """Take the response of a turn; return the whole episode if it is over."""
        return found

    def drop(self) -> Sequence[Future[Any]]:
        """Give the episode up, unless it is over; return the calls that free what it holds."""
        return ()


class Environments:
    """Makes the episodes of a run with the environments in the user's file."""

    def __init__(
        self,
        config: Config,
        tokenizer: Tokenizer,
        printed: Path | None = None,
        note: Callable[[str], None] = lambda text: None,
        nodes: WorkerNodes = (),
    ) -> None:
        """Load the environments; blocks, also until a server of env.path answers: `note` tells the user that it waits.

        `nodes`: where their processes run; empty: here.
        `printed`: the file for their output; None: the output of this process.
        Raises EpisodeError for a file without usable environments, ModelError for a chat template without room for
        turns or tools.
        """
        self.file, self.config, self.tokenizer = config.env.path, config, tokenizer
        self.host = Host(config, printed, note, nodes)
        try:
            self.described = self.host.describe()
            templated = config.data.apply_chat_template
            kinds = {one.kind for one in self.described.values()}
            if "tools" in kinds and not templated:
                raise ConfigError(
                    f"env.path: {self.file} has tools, which the chat template shows to the policy: set "
                    "data.apply_chat_template = true"
                )
            readers = {"tools": tool_reader(tokenizer)} if "tools" in kinds else {}
            self.tokens = {
                kind: TurnTokens(tokenizer, templated and kind not in ("agent", EXECUTOR), readers.get(kind))
                for kind in kinds
            }
        except BaseException:
            self.host.close()
            raise
        self.numbers = itertools.count()
        self.lost = self.begun = 0
        self.printed, self._note = printed, note
        self._encoder = ThreadPoolExecutor(1, thread_name_prefix="turns")

    def check_rewards(self) -> None:
        """Raise EpisodeError for an environment without rewards if nothing else gives any; end the processes before."""
        without = [name for name, found in self.described.items() if not found.rewards]
        if without and not has_own_reward(self.config) and not has_teacher(self.config):
            self.close()
            raise EpisodeError(
                f"env.path: {self.file}: {without[0] or 'its class'} has no get_reward, and no other reward is set: "
                "write get_reward(self) -> float, or name a source of rewards (reward.remote_url, reward.preset)"
            )

    def check_rows(self, prompts: Iterable[Prompt], where: str) -> None:
        """Raise EpisodeError for a row that names no environment, or lacks a column that its own needs.

        Before it raises, it ends the processes.
        """
        for prompt in prompts:
            named = str(prompt.row.get(COLUMN, ""))
            found = self.described.get("") or self.described.get(named)
            if found is None:
                self.close()
                what = f"names {named!r}{meant(named, self.described)}" if named else "is not there, or is empty"
                what += f" ({self.file} has {', '.join(self.described)}): correct it"
                raise EpisodeError(f"{where}, row {prompt.index}: the column {COLUMN!r} {what}")
            if lacking := [column for column in found.columns if column not in prompt.row]:
                self.close()
                raise EpisodeError(
                    f"{where}, row {prompt.index}: no column {lacking[0]!r}, which reset of the environment in "
                    f"{self.file} needs (columns: {', '.join(prompt.row)}): add it, or give the parameter a default"
                )

    def try_out(self, prompt: Prompt, said: str, where: str) -> tuple[str, Trajectory | EpisodeError]:
        """Play an episode whose turns all are `said`, without an engine; return its prompt, and it or why it is lost.

        Raises EpisodeError if it does not begin.
        """
        episode = Turns(self, prompt, Sampling(max_new_tokens=self.config.rollout.max_new_tokens), 0)
        ids = [*self.tokenizer.encode(said, add_special_tokens=False), self.tokenizer.eos_token_id]

        async def play() -> tuple[str, Trajectory | EpisodeError]:
            text, whole = "", None
            try:
                await episode.reset()
                text = episode.text or prompt.text
                while whole is None:
                    turn: I32 = np.array(ids[: episode.limit], dtype=np.int32)
                    none, mask = np.zeros(len(turn), np.float32), np.ones(len(turn), np.bool_)
                    found = Trajectory(prompt.index, 0, episode.token_ids, turn, none, mask, STOP, said, [])
                    whole = await episode.answered(found)
                return text, whole
            except (EpisodeError, ModelError, ProcessLost) as error:
                lost = EpisodeError(str(error) or "the process or the server that it lived in is gone")
                if not text:
                    raise EpisodeError(f"{where}, row {prompt.index}: {lost}") from error
                return text, lost

        try:
            return asyncio.run(play())
        finally:
            wait(episode.drop())  # the processes may end next

    def lines(self) -> Iterator[str]:
        """Describe each environment to the user."""
        for name, found in self.described.items():
            kind = self.tokens[found.kind]
            names = [schema["function"]["name"] for schema in found.schemas]
            text = f"tools {', '.join(names)}, calls in the format {kind.reader.name}" if kind.reader else found.kind
            yield f"environment{name and ' '}{name}: {text}"

    def begin(self, prompt: Prompt, sampling: Sampling, sample: int) -> Episode:
        """Begin an episode."""
        self.begun += 1
        return Turns(self, prompt, sampling, sample)

    def close(self) -> None:
        """End the processes of the environments."""
        self._encoder.shutdown(wait=False, cancel_futures=True)
        self.host.close()

    async def encode(self, work: Callable[[], T]) -> T:
        """Do work with tokenizer and chat template, in another thread than the loop's."""
        return await asyncio.get_running_loop().run_in_executor(self._encoder, work)

    def lose(self, error: UserError, prompt: Prompt) -> None:
        """Count a lost episode, and log it; tell the user of the first, second, fourth, eighth and so on.

        Raises EpisodeError if most are lost.
        """
        self.lost += 1
        log.info("an episode of row %s is lost: %s", prompt.index, error)
        said = f"{self.lost} of {self.begun} episodes are lost, the last one: {error}"
        if self.printed is not None:
            with self.printed.open("a", encoding="utf-8", errors="replace") as file:
                file.write(f"lost: {error}\n  row {prompt.index}: {prompt.text!r}\n")
            said += f"; {self.printed} has each with its row"
        if self.lost >= FEW_LOST and 2 * self.lost > self.begun:
            raise EpisodeError(said) from error
        if self.lost.bit_count() == 1:
            self._note(f"warning: {said}")


class Turns(Episode):
    """Plays an episode with an environment."""

    def __init__(self, environments: Environments, prompt: Prompt, sampling: Sampling, sample: int) -> None:
        super().__init__(prompt, sampling, sample)
        self._environments, self._prompt, self._sampling, self._sample = environments, prompt, sampling, sample
        self._most = sampling.max_new_tokens
        self._info: EnvironmentInfo
        self._tokens: TurnTokens
        self._began = time.monotonic()
        self._begin_anew(1)

    def _begin_anew(self, tries: int) -> None:
        self._tries, self._lost_before = tries, self._environments.lost
        self._calls = self._environments.host.calls_of(next(self._environments.numbers))
        self._prompt_ids: I32 = self._prompt.token_ids
        self.text = self._messages = ""  # an environment that makes the prompt sets both
        self._ids: list[int] = []  # sampled tokens and tokens of observations, in their order
        self._logprobs: list[float] = []
        self._sampled: list[bool] = []
        self._digests: list[tuple[int, int]] = []
        self._versions: list[VersionSpan] = []
        self._dialogue: Messages = []
        self._sums = Answer(counts={})
        self._turns = 0

    async def start(self) -> Trajectory | None:
        return await self._played(self.reset())

    async def reset(self) -> None:
        """Have the environment begin, and make the prompt. Raises ProcessLost, EpisodeError or ModelError."""
        environments, row = self._environments, self._prompt.row
        data = replaced(environments.config.data, input_key=self._prompt.input_key)
        plain = [{"role": "user", "content": self._prompt.text}]
        messages = prompt_messages(row, data) if data.input_key in row else plain
        begun = await self._calls.begin(self._started(row, messages))
        await environments.encode(partial(self._begin, begun))

    def _started(self, row: dict[str, Any], messages: Messages) -> Start:
        sampling, text, environments = self._sampling, self._prompt.text, self._environments
        given = {name: getattr(sampling, name) for name in ("temperature", "top_p", "top_k", "stop")}
        given["max_tokens"] = self._most
        longest, model = environments.config.data.max_len, str(environments.tokenizer.directory)
        return Start(row, self._prompt.label, messages, text, given, longest, model)

    async def take(self, found: Trajectory) -> Trajectory | None:
        return await self._played(self.answered(found))

    async def _played(self, part: Awaitable[Trajectory | None]) -> Trajectory | None:
        """Await a part of the episode, which begins anew if its process was lost, and is lost if the part fails."""
        try:
            return await part
        except ProcessLost:
            return await self._anew()
        except (EpisodeError, ModelError) as error:
            return self._lost(error)

    async def answered(self, found: Trajectory) -> Trajectory | None:
        """Have the environment answer a turn; return the whole episode if it is over. Raises as `reset`."""
        environments, env = self._environments, self._environments.config.env
        self._turns += 1
        self._append(found)
        calls, message = [], {"role": "assistant", "content": found.text}
        if (reader := self._tokens.reader) is not None:
            text = reader.cut(environments.tokenizer.decode(found.response_ids.tolist(), skip_special_tokens=False))
            calls = reader.read(text, self._info.schemas)
            message = reader.written(text, found.text, calls)
        self._dialogue.append(message)
        turn = Turn(found.text, calls, found.response_ids.tolist(), found.finish_reason, message)
        answer = await self._calls.turn(turn)
        self._add(answer)
        over = answer.done or found.finish_reason == REPETITION or self._turns == env.max_turns
        late = env.max_seconds and time.monotonic() - self._began > env.max_seconds
        if over or late or not await environments.encode(partial(self._observe, answer, calls)):
            self._add(await self._calls.end())
            return self._whole(found, found.finish_reason if over else LENGTH)
        return None

    def drop(self) -> Sequence[Future[Any]]:
        return self._calls.leave()

    async def _anew(self) -> Trajectory | None:
        """Begin again in another process; that another environment has ended the shared one does not count as a try."""
        self._calls.leave()
        self._begin_anew(self._tries + (self._environments.lost == self._lost_before))
        if self._tries > MOST_TRIES:
            return self._lost(EpisodeError(f"the process or the server that it lived in was gone {MOST_TRIES} times"))
        return await self.start()

    def _begin(self, begun: Begun) -> None:
        environments = self._environments
        self._info = environments.described[begun.name]
        self._tokens = environments.tokens[self._info.kind]
        if begun.ids is not None:
            ids = begun.ids
        elif begun.text is not None:
            ids = environments.tokenizer.encode(begun.text)
        elif begun.messages is not None:
            ids = self._tokens.prompt(begun.messages, self._info.schemas, environments.file)
            self._messages = json.dumps(begun.messages)
        else:
            self._go_on()
            return
        longest = environments.config.data.max_len - self._most
        self.text = environments.tokenizer.decode(ids, skip_special_tokens=False)
        if not 0 < len(ids) <= longest:
            raise EpisodeError(
                f"{environments.file}: the environment begins with a prompt of {len(ids)} tokens, and 1 to {longest} "
                f"fit (data.max_len - rollout.max_new_tokens): {cut(self.text, 80)!r}"
            )
        self._prompt_ids = np.array(ids, dtype=np.int32)
        self._go_on(begun.limit)

    def _observe(self, answer: Answer, calls: list[ToolCall]) -> bool:
        """Append the observation; return False if no turn fits after it."""
        before = [*self._prompt_ids.tolist(), *self._ids]
        if answer.ids is not None:
            ids = answer.ids
        elif answer.text is not None:
            ids = self._tokens.text_behind(before, answer.text)
        else:
            ids = self._tokens.behind(before, answer.messages or [], calls, self._info.schemas)
        if len(before) + len(ids) >= self._environments.config.data.max_len:
            return False
        text = answer.text if answer.ids is None else self._environments.tokenizer.decode(ids)
        self._dialogue += answer.messages or ([{"role": "user", "content": text}] if text else [])
        self._ids += ids
        self._logprobs += [0.0] * len(ids)
        self._sampled += [False] * len(ids)
        if self._versions:
            self._versions[-1] = replace(self._versions[-1], end=len(self._ids))
        self._go_on(answer.limit)
        return True

    def _append(self, found: Trajectory) -> None:
        before = len(self._ids)
        self._versions += [replace(one, start=one.start + before, end=one.end + before) for one in found.versions]
        self._ids += found.response_ids.tolist()
        self._logprobs += found.rollout_logprobs.tolist()
        self._sampled += [True] * len(found.response_ids)
        self._digests += found.digests

    def _go_on(self, limit: int | None = None) -> None:
        self.token_ids = np.concatenate([self._prompt_ids, np.array(self._ids, dtype=np.int32)])
        room = self._environments.config.data.max_len - len(self.token_ids)
        self.limit = min(self._most, room, limit or room)

    def _add(self, answer: Answer) -> None:
        sums = self._sums
        sums.reward += answer.reward
        sums.score = sums.score if answer.score is None else answer.score
        sums.logs |= answer.logs
        sums.counts = dict(Counter(sums.counts) + Counter(answer.counts))

    def _lost(self, error: UserError) -> Trajectory:
        """Return the episode as lost: its action mask leaves all of it out of training."""
        self._environments.lose(error, self._prompt)
        if not self._ids:
            self._ids, self._logprobs, self._sampled = [self._environments.tokenizer.eos_token_id], [0.0], [True]
        none: I32 = np.zeros(0, dtype=np.int32)
        floats, mask = none.astype(np.float32), none.astype(np.bool_)
        empty = Trajectory(self._prompt.index, self._sample, none, none, floats, mask, LOST, "", [])
        return self._whole(empty, LOST)

    def _whole(self, last: Trajectory, reason: str) -> Trajectory:
        mask: Bool = np.array(self._sampled, dtype=np.bool_) & (reason != LOST)
        read, several = self._environments.tokenizer.response_text, self._turns != 1 or reason == LOST
        text = read(self._prompt_ids.tolist(), self._ids) if several else last.text
        return replace(
            last,
            prompt_ids=self._prompt_ids,
            response_ids=np.array(self._ids, dtype=np.int32),
            rollout_logprobs=np.array(self._logprobs, dtype=np.float32),
            action_mask=mask,
            finish_reason=reason,
            text=text,
            versions=self._versions,
            reward=self._sums.reward,
            score=self._sums.score,
            logs=self._sums.logs,
            counts=self._sums.counts,
            digests=[] if reason == LOST else self._digests,
            turns=self._turns,
            began=self.text,
            messages=self._messages,
            dialogue=json.dumps(self._dialogue),
        )
