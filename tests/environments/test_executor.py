"""OpenRLHF's `AgentExecutor.execute`: each of its asks is a turn, and its tokens have to be those that were sampled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from random_models import tiny_tokenizer

from slurm_rlhf.environments.kinds import Instances
from slurm_rlhf.environments.records import Answer, Begun, Start, Turn
from slurm_rlhf.errors import EpisodeError

ADDS = """
import asyncio, threading
from copy import deepcopy
from openrlhf.utils.agent import AgentExecutorBase

class AgentExecutor(AgentExecutorBase):
    played = 0

    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine):
        self.played += 1
        ids, ranges, texts = hf_tokenizer.encode(prompt, add_special_tokens=False), [], []
        while len(texts) < 3:
            sampling_params.max_tokens = min(4, max_length - len(ids))
            output = await self.ask(llm_engine, ids, deepcopy(sampling_params))
            said = output.outputs[0]
            ranges.append((len(ids), len(ids) + len(said.token_ids)))
            texts.append(said.text)
            ids = ids + said.token_ids
            if said.text == label or said.finish_reason == "length":
                break
            ids = ids + hf_tokenizer.encode("no=", add_special_tokens=False)
        return {"observation_tokens": ids, "action_ranges": ranges, "reward": float(texts[-1] == label),
                "scores": None, "extra_logs": {"played": self.played, "turns": len(texts)}}

    async def ask(self, engine, ids, sampling):
        return await engine.generate(ids, sampling)
"""
ASK = "output = await self.ask(llm_engine, ids, deepcopy(sampling_params))"
FROM_A_SERVER = """
        loop = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, daemon=True).start()
        asked = asyncio.run_coroutine_threadsafe(engine.generate(ids, sampling), loop)
        return await asyncio.wrap_future(asked)
"""


class Played:
    """Plays an episode of an executor as the conductor does, but in this process."""

    def __init__(self, directory: Path, code: str = ADDS) -> None:
        self.tokenizer, self.number = tiny_tokenizer(), 0
        self.tokenizer.save_pretrained(directory / "model")
        (directory / "agent.py").write_text(code)
        self.instances, self.model = Instances(str(directory / "agent.py")), str(directory / "model")

    def ids(self, text: str) -> list[int]:
        found: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return found

    def begin(self, label: Any = "4", number: int = 0) -> Begun:
        sampling = {"temperature": 0.7, "top_p": 1.0, "top_k": -1, "stop": [], "max_tokens": 6}
        start = Start({}, label, [], "2+2=", sampling, 40, self.model)
        return msgspec.convert(self.instances.begin(number, msgspec.to_builtins(start)), Begun)

    def turn(self, text: str, reason: str = "stop", number: int = 0) -> Answer:
        turn = Turn(text, [], self.ids(text), reason)
        return msgspec.convert(self.instances.turn(number, msgspec.to_builtins(turn)), Answer)

    def end(self, number: int = 0) -> Answer:
        try:
            return msgspec.convert(self.instances.end(number), Answer)
        finally:
            self.instances.drop(number)


@pytest.mark.parametrize("server", [False, True])
def test_each_ask_is_a_turn(tmp_path: Path, server: bool) -> None:
    code = ADDS.replace("        return await engine.generate(ids, sampling)\n", FROM_A_SERVER) if server else ADDS
    played = Played(tmp_path, code)
    assert msgspec.convert(played.instances.describe(), Any)[""]["kind"] == "executor"
    begun = played.begin()
    assert (begun.ids, begun.limit, begun.text, begun.messages) == (played.ids("2+2="), 4, None, None)
    first = played.turn("3")
    assert (first.ids, first.limit, first.done, first.reward) == (played.ids("no="), 4, False, 0.0)
    last = played.turn("4")
    assert (last.done, last.reward, last.score, last.logs) == (True, 1.0, None, {"played": 1, "turns": 2})
    assert played.end() == Answer()


def test_an_executor_plays_one_episode_at_a_time_and_then_the_next(tmp_path: Path) -> None:
    played = Played(tmp_path)
    played.begin(number=0)
    played.begin(number=1)
    assert [played.turn("4", number=one).logs["played"] for one in (1, 0)] == [1, 1]
    for number in (0, 1):
        played.end(number)
    for number in (2, 3):
        played.begin(number=number)
    played.instances.drop(2)  # given up in the middle
    played.begin(number=4)
    assert [played.turn("4", number=one).logs["played"] for one in (4, 3)] == [3, 2]


def test_an_ask_that_no_turn_is_left_for_gets_no_tokens_and_the_reward_counts(tmp_path: Path) -> None:
    played = Played(tmp_path)
    played.begin(label="")
    assert not played.turn("3").done
    answer = played.end()
    assert (answer.reward, answer.logs["turns"]) == (1.0, 2)


SHOWN = f"""try:
                {ASK}
                print(output.outputs[0].finish_reason)
            finally:
                print('left')"""


def test_one_that_is_given_up_gets_no_tokens_either_and_lets_go_of_what_it_holds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    played = Played(tmp_path, ADDS.replace(ASK, SHOWN))
    played.begin()
    assert capsys.readouterr().out == ""
    played.instances.drop(0)
    assert capsys.readouterr().out == "length\nleft\n"


def test_one_that_never_returns_then_is_an_error_and_is_cancelled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = ADDS.replace(' or said.finish_reason == "length"', "").replace("len(texts) < 3", "True")
    played = Played(tmp_path, code.replace(ASK, SHOWN))
    played.begin()
    played.turn("3")
    with pytest.raises(EpisodeError, match=r"agent.py: AgentExecutor.execute asks for more after.*env.max_turns"):
        played.end()
    assert capsys.readouterr().out == "stop\nleft\nlength\nleft\nlength\nleft\nleft\n"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (ASK, "raise KeyError('lost')", r"agent.py:14: AgentExecutor.execute raised KeyError: 'lost'"),
        (ASK, "exit(3)", "AgentExecutor.execute raised SystemExit: 3"),
        (ASK, "return", "AgentExecutor.execute returned None; expected a dict with observation_tokens"),
        (ASK, "return {'observation_tokens': [], 'action_ranges': []}", "has not asked llm_engine.generate"),
        (ASK, "await llm_engine.generate('2+2=')", "raised ValueError: invalid literal for int"),
        (ASK, "await llm_engine.generate([1], None, {'image': [1]})", "models see no images here"),
        ("min(4, max_length - len(ids))", "0", "max_tokens = 0: ask for one token at least"),
        ("(self, prompt,", "(self, query,", "unexpected keyword argument 'prompt'"),
        (ASK, f"sampling_params.temperature = 0.5; {ASK}", "= 0.5; the run samples with rollout.temperature = 0.7"),
    ],
)
def test_what_goes_wrong_before_the_first_ask_is_named(tmp_path: Path, old: str, new: str, said: str) -> None:
    with pytest.raises(EpisodeError, match=said):
        Played(tmp_path, ADDS.replace(old, new)).begin()


def test_an_ask_behind_other_tokens_is_named(tmp_path: Path) -> None:
    played = Played(tmp_path, ADDS.replace("ids = ids + said.token_ids", "ids = ids[:-1] + said.token_ids"))
    played.begin()
    with pytest.raises(EpisodeError, match=r"do not begin with the \d+ so far: an episode is one sequence"):
        played.turn("3")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"observation_tokens": ids', '"observation_tokens": ids[1:]', "that are not those of its asks"),
        ('"action_ranges": ranges', '"action_ranges": ranges[1:]', "that are not those of its asks"),
        ('"action_ranges": ranges', '"ranges": ranges', "expected a dict with observation_tokens and action_ranges"),
        ("        return {", "        return\n        {", "execute returned None; expected a dict"),
        ('"reward": float', '"reward": str', "expected a finite number as reward"),
        ('"scores": None', '"scores": float("nan")', "expected a finite number as reward"),
    ],
)
def test_a_result_that_is_not_the_episode_is_named(tmp_path: Path, old: str, new: str, said: str) -> None:
    played = Played(tmp_path, ADDS.replace(old, new))
    played.begin()
    with pytest.raises(EpisodeError, match=said):
        played.turn("4")


def test_a_reward_of_none_leaves_it_to_other_sources(tmp_path: Path) -> None:
    played = Played(tmp_path, ADDS.replace('"reward": float(texts[-1] == label)', '"reward": None'))
    played.begin()
    assert played.turn("4").reward == 0.0


def test_a_tool_may_be_named_execute(tmp_path: Path) -> None:
    code = "class Environment:\n    def reset(self): ...\n    def execute(self) -> str:\n        '''Runs it.'''\n"
    assert msgspec.convert(Played(tmp_path, code).instances.describe(), Any)[""]["kind"] == "tools"
