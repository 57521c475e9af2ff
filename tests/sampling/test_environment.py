"""Episodes of several turns: which tokens they have, which of them are trained on, and what the user's class may do."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_templates import TEMPLATES, write_tokenizer
from random_models import saved_tokenizer

from slurm_rlhf.config.schema import Config
from slurm_rlhf.data.tokenizer import Tokenizer
from slurm_rlhf.environments.records import ARGUMENTS, CALLS, ToolCall
from slurm_rlhf.errors import ConfigError, EpisodeError, ModelError, RewardError
from slurm_rlhf.records import LENGTH, LOST, REPETITION, STOP, Prompt, Sampling, Trajectory, VersionSpan, digest
from slurm_rlhf.rewards.items import items_of
from slurm_rlhf.sampling.environment import Environments, Episode

CHAT = "{% for m in messages %}{{ m.role[0] }}={{ m.content }}*{% endfor %}{% if add_generation_prompt %}a={% endif %}"
"""A turn ends with `*`."""
GAME = """
class Environment:
    def reset(self, row):
        self.row, self.turns = row, 0
        return row.get("start")

    def step(self, messages):
        self.turns += 1
        self.row.setdefault("seen", []).append([message["content"] for message in messages])
        answer = self.row["answers"][self.turns - 1]
        if answer == "raise":
            raise KeyError("lost")
        return eval(answer)
"""


MADE: list[Environments] = []
NOTES: list[str] = []


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    """End the processes of a test's environments."""
    yield
    while MADE:
        MADE.pop().close()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return saved_tokenizer(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return saved_tokenizer(tmp_path_factory.mktemp("chat"), CHAT)


def environments(tmp_path: Path, tokenizer: Tokenizer, code: str = GAME, **settings: Any) -> Environments:
    config = Config()
    (tmp_path / "game.py").write_text(code)
    config.env.path = str(tmp_path / "game.py")
    config.data.max_len, config.rollout.max_new_tokens = 40, 6
    config.data.apply_chat_template = tokenizer.chat_template is not None
    config.env.workers = 1
    for name, value in settings.items():
        group, _, key = name.partition("__")
        setattr(getattr(config, group), key, value)
    MADE.append(Environments(config, tokenizer, tmp_path / "reward.log", NOTES.append))
    return MADE[-1]


def sampled(tokenizer: Tokenizer, text: str, reason: str = STOP, version: int = 3) -> Trajectory:
    ids = np.array(tokenizer.encode(text, add_special_tokens=False), dtype=np.int32)
    floats, mask = np.full(len(ids), -0.5, dtype=np.float32), np.ones(len(ids), dtype=np.bool_)
    spans = [VersionSpan(0, len(ids), version)]
    return Trajectory(7, 1, ids[:0], ids, floats, mask, reason, text, spans, 2, "k", digests=[digest(ids)])


def play(made: Environments, row: dict[str, Any], texts: list[Trajectory]) -> tuple[Trajectory, list[tuple[str, int]]]:
    """The whole episode, and the text and limit of each turn that was asked for."""
    prompt = "2+2="
    ids = np.array(made.tokenizer.encode(prompt, add_special_tokens=False), dtype=np.int32)
    asked = []

    async def run() -> Trajectory:
        limit = Sampling(max_new_tokens=made.config.rollout.max_new_tokens)
        episode = made.begin(Prompt(7, prompt, ids, None, {"input": prompt, **row}, "input"), limit, 1)
        try:
            return await turns(episode)
        finally:
            episode.drop()

    async def turns(episode: Episode) -> Trajectory:
        if (lost := await episode.start()) is not None:
            return lost
        for found in texts:
            text = made.tokenizer.decode(episode.token_ids.tolist(), skip_special_tokens=False)
            asked.append((text, episode.limit))
            if (whole := await episode.take(found)) is not None:
                return whole
        raise AssertionError("the episode went on")

    return asyncio.run(run()), asked


def test_a_plain_prompt_is_an_episode_of_one_turn(plain: Tokenizer) -> None:
    found = sampled(plain, "4")
    episode = Episode(Prompt(0, "2+2=", found.response_ids), Sampling(max_new_tokens=5), 0)
    assert asyncio.run(episode.start()) is None
    assert (episode.token_ids is found.response_ids, episode.limit) == (True, 5)
    assert asyncio.run(episode.take(found)) is found


def test_turns_become_one_trajectory(tmp_path: Path, plain: Tokenizer) -> None:
    row = {"answers": ['("no=", 0.25, False)', "(None, 1, True)"]}
    found = [sampled(plain, "35", version=3), sampled(plain, "4", version=4)]
    whole, asked = play(environments(tmp_path, plain), row, found)
    assert asked == [("2+2=", 6), ("2+2=35no=", 6)]
    assert plain.decode(whole.prompt_ids.tolist()) == "2+2="
    assert plain.decode(whole.response_ids.tolist()) == whole.text == "35no=4"
    assert whole.action_mask.tolist() == [True] * 2 + [False] * 3 + [True]
    assert whole.rollout_logprobs.tolist() == [-0.5] * 2 + [0.0] * 3 + [-0.5]
    assert whole.versions == [VersionSpan(0, 5, 3), VersionSpan(5, 6, 4)]
    assert (whole.reward, whole.turns, whole.finish_reason) == (1.25, 2, STOP)
    assert (whole.prompt, whole.sample, whole.engine, whole.key) == (7, 1, 2, "k")
    own = whole.response_ids[whole.action_mask]
    assert whole.digests == [digest(own[:2]), digest(own[2:])]  # as the engines made them
    (item,) = items_of([Prompt(7, "2+2=", whole.prompt_ids, None, {"input": "2+2=", **row}, "input")], [whole])
    assert (item["messages"], item["version"]) == ([{"role": "user", "content": "2+2="}], 3)
    assert [(one["role"], one["content"]) for one in item["dialogue"]] == [
        *(("assistant", "35"), ("user", "no="), ("assistant", "4"))
    ]
    assert "seen" not in row, "the class gets a copy of the row"


def test_the_end_waits_for_no_chat_template(tmp_path: Path, plain: Tokenizer) -> None:
    made, go_on = environments(tmp_path, plain), threading.Event()
    work, later = made._encoder.submit(go_on.wait, 10.0), made._encoder.submit(print)
    made.close()
    assert (work.done(), later.cancelled()) == (False, True)
    go_on.set()


def test_a_response_that_is_cut_off_gets_an_answer_too(tmp_path: Path, plain: Tokenizer) -> None:
    row = {"answers": ['("no", 0.0, False)', "(None, 0.5, True)"]}
    found = [sampled(plain, "333333", LENGTH), sampled(plain, "4")]
    assert play(environments(tmp_path, plain), row, found)[0].text == "333333no4"


@pytest.mark.parametrize(
    ("settings", "found", "turns", "reason"),
    [
        ({"env__max_turns": 1}, [("3", STOP)], 1, STOP),
        ({"env__max_seconds": 1e-9}, [("3", STOP)], 1, LENGTH),
        ({"data__max_len": 7}, [("3", STOP)], 1, LENGTH),  # prompt, answer and observation fill it
        ({"data__max_len": 8}, [("3", STOP), ("4", STOP)], 2, LENGTH),
        ({}, [("33", REPETITION)], 1, REPETITION),
    ],
)
def test_what_ends_an_episode(
    tmp_path: Path, plain: Tokenizer, settings: dict[str, Any], found: list[tuple[str, str]], turns: int, reason: str
) -> None:
    row = {"answers": ['("no", 1.0, False)'] * 9}
    texts = [sampled(plain, text, why) for text, why in found]
    whole, asked = play(environments(tmp_path, plain, **settings), row, texts)
    assert (whole.turns, whole.reward, whole.finish_reason) == (turns, turns, reason)
    assert asked[-1][1] == min(6, settings.get("data__max_len", 40) - len(asked[-1][0]))


def test_the_prompt_may_be_the_environments(tmp_path: Path, plain: Tokenizer) -> None:
    whole, asked = play(
        environments(tmp_path, plain), {"start": "7+7=", "answers": ["(None, 0, True)"]}, [sampled(plain, "4")]
    )
    assert (asked, plain.decode(whole.prompt_ids.tolist())) == ([("7+7=", 6)], "7+7=")
    (item,) = items_of([Prompt(7, "2+2=", whole.prompt_ids, None, {"input": "2+2="}, "input")], [whole])
    assert (item["prompt"], item["messages"]) == ("7+7=", [{"role": "user", "content": "7+7="}])


@pytest.mark.parametrize("ends", ["*", ""])
def test_a_chat_template_stands_around_each_turn_and_no_sampled_token_changes(
    tmp_path: Path, chat: Tokenizer, ends: str
) -> None:
    """The policy ends its turn with the template's token, or was cut off before."""
    row = {"start": "hi", "answers": ['([{"role": "tool", "content": "no"}], 0, False)', "(None, 1, True)"]}
    found = [sampled(chat, f"3{ends}", STOP if ends else LENGTH), sampled(chat, "4*")]
    whole, asked = play(environments(tmp_path, chat), row, found)
    assert [text for text, _ in asked] == ["u=hi*a=", "u=hi*a=3*t=no*a="]
    inserted = [not own for own in whole.action_mask]
    assert chat.decode(whole.response_ids[inserted].tolist()) == ("t=no*a=" if ends else "*t=no*a=")


def test_messages_so_far_are_what_step_gets(tmp_path: Path, chat: Tokenizer) -> None:
    code = GAME.replace(
        "return eval(answer)",
        'return eval(answer) if self.turns < 2 else (None, float(str(messages) == self.row["so far"]), True)',
    )
    so_far = [("user", "hi"), ("assistant", "3*"), ("user", "no"), ("assistant", "4*")]
    row = {"start": "hi", "answers": ['("no", 0, False)', ""]}
    row["so far"] = str([{"role": role, "content": content} for role, content in so_far])
    assert play(environments(tmp_path, chat, code), row, [sampled(chat, "3*"), sampled(chat, "4*")])[0].reward == 1.0


def test_without_a_prompt_of_its_own_an_environment_gets_the_messages_of_the_row(
    tmp_path: Path, chat: Tokenizer
) -> None:
    """And not the text that the template makes of them."""
    code = GAME.replace("return eval(answer)", 'return None, float(messages[:-1] == self.row["input"]), True')
    row = {"input": [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}], "answers": [""]}
    assert play(environments(tmp_path, chat, code), row, [sampled(chat, "3*")])[0].reward == 1.0


def test_a_template_that_changes_earlier_turns_is_refused(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.content if loop.last else m.content[:-2] }}*{% endfor %}"
    with pytest.raises(ModelError, match="changes earlier messages when others follow"):
        environments(tmp_path, saved_tokenizer(tmp_path / "model", template))


def lost(tmp_path: Path, tokenizer: Tokenizer, row: dict[str, Any], **settings: Any) -> str:
    """Play an episode that is lost in its first turn; return what the log says of it."""
    whole, _ = play(environments(tmp_path, tokenizer, **settings), row, [sampled(tokenizer, "3")])
    assert (whole.finish_reason, whole.action_mask.any(), whole.reward, whole.prompt, whole.sample) == (
        LOST,
        False,
        0,
        7,
        1,
    )
    assert len(whole.response_ids) == len(whole.rollout_logprobs) == 1
    text = (tmp_path / "reward.log").read_text()
    assert text.endswith("\n  row 7: '2+2='\n")
    return text[text.index("lost: ") :]


def test_an_episode_whose_environment_fails_is_lost(tmp_path: Path, plain: Tokenizer) -> None:
    assert "Environment.step raised KeyError: 'lost'" in lost(tmp_path, plain, {"answers": ["raise"]})


def test_a_prompt_that_does_not_fit_is_named(tmp_path: Path, plain: Tokenizer) -> None:
    said = lost(tmp_path, plain, {"start": "3" * 50})
    assert "begins with a prompt of 50 tokens, and 1 to 34 fit" in said


def test_lost_episodes_are_reported_now_and_then_and_where_most_are_lost_the_run_ends(
    tmp_path: Path, plain: Tokenizer
) -> None:
    made = environments(tmp_path, plain)
    NOTES.clear()
    for _ in range(7):
        assert play(made, {"answers": ["raise"]}, [sampled(plain, "3")])[0].finish_reason == LOST
    with pytest.raises(EpisodeError, match=r"8 of 8 episodes are lost, the last one.*KeyError.*reward.log has each"):
        play(made, {"answers": ["raise"]}, [sampled(plain, "3")])
    assert [note.partition(" episodes are lost")[0] for note in NOTES] == [f"warning: {n} of {n}" for n in (1, 2, 4)]


TOOL = """
class Environment:
    def reset(self, number: int) -> None:
        self.number, self.found = number, False

    def guess(self, count: int) -> str:
        '''Guesses the number.

        Args:
            count: The guess.
        '''
        self.found = self.found or count == self.number
        return "right" if count == self.number else "higher" if count < self.number else "lower"

    def get_reward(self) -> float:
        return float(self.found)

def called(environments, completions):
    return [sum(len(one.get("tool_calls", [])) for one in completions[0])]
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hermes", "deepseek"])
def test_tools_are_called_and_answer(tmp_path: Path, name: str) -> None:
    tokenizer = write_tokenizer(tmp_path, TEMPLATES[name])
    made = environments(tmp_path, tokenizer, TOOL, data__max_len=1000, rollout__max_new_tokens=100)
    (tools,) = made.described.values()
    reader = made.tokens["tools"].reader
    question = {"role": "user", "content": "2+2="}

    def call(**arguments: Any) -> Trajectory:
        message = reader.message("", [ToolCall("guess", arguments)])
        text = tokenizer.chat([question, message], tools=tools.schemas, answer=False)
        return sampled(tokenizer, text[len(tokenizer.chat([question], tools=tools.schemas)) :].rstrip("\n"))

    texts = [call(count=3), call(counts=3), call(count=7), sampled(tokenizer, "It is 7.<|end|>")]
    whole, asked = play(made, {"number": 7}, texts)
    assert asked[0][0] == tokenizer.chat([question], tools=tools.schemas)
    assert (whole.reward, whole.turns, whole.counts) == (4.0, 4, {CALLS: 3, ARGUMENTS: 1})
    observed = tokenizer.decode(whole.response_ids[~whole.action_mask].tolist())
    assert [word in observed for word in ("higher", "unknown field `counts`", "right")] == [True] * 3
    # As TRL's trainer hands them to a reward: `content` is what stands outside calls.
    dialogue = json.loads(whole.dialogue)
    assert [one["role"] for one in dialogue] == ["assistant", "tool"] * 3 + ["assistant"]
    called = {"type": "function", "function": {"name": "guess", "arguments": {"count": 3}}}
    assert dialogue[0] == {"role": "assistant", "content": "", "tool_calls": [called]}
    assert dialogue[-1] == {"role": "assistant", "content": "It is 7."}
    assert dialogue[1] == {"role": "tool", "name": "guess", "content": "higher"}
    assert whole.response_ids[whole.action_mask].tolist() == [i for one in texts for i in one.response_ids.tolist()]


@pytest.mark.slow
def test_tools_need_a_chat_template(tmp_path: Path, plain: Tokenizer) -> None:
    with pytest.raises(ConfigError, match=r"data\.apply_chat_template = true"):
        environments(tmp_path, plain, TOOL)


@pytest.mark.slow
def test_without_a_reward_of_its_own_it_needs_another_source(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path, TEMPLATES["hermes"])
    environments(tmp_path, tokenizer, TOOL).check_rewards()
    silent = TOOL.replace("def get_reward", "def _unused").replace("def called", "def _called")
    environments(tmp_path, tokenizer, silent, reward__preset="exact").check_rewards()
    made = environments(tmp_path, tokenizer, silent)
    made.config.algo.distill.model_name_or_path = "teacher"
    made.check_rewards()
    made.config.algo.distill.model_name_or_path = ""
    with pytest.raises(EpisodeError, match=r"its class has no get_reward, and no other reward is set: write get_rew"):
        made.check_rewards()


@pytest.mark.slow
def test_a_row_without_a_column_that_is_needed_is_named(tmp_path: Path) -> None:
    made = environments(tmp_path, write_tokenizer(tmp_path, TEMPLATES["hermes"]), TOOL)
    made.check_rows([Prompt(0, "a", np.zeros(1, np.int32), None, {"number": 1})], "data.prompt_dataset")
    with pytest.raises(EpisodeError, match=r"data\.prompt_dataset, row 4: no column 'number', which reset"):
        made.check_rows([Prompt(4, "a", np.zeros(1, np.int32), None, {"label": 1})], "data.prompt_dataset")


@pytest.mark.slow
@pytest.mark.parametrize(("row", "said"), [({}, "is not there"), ({"environment": "gues"}, "names 'gues'")])
def test_a_row_that_names_no_environment_is_named(tmp_path: Path, row: dict[str, Any], said: str) -> None:
    two = f"{TOOL}\nENVIRONMENTS = {{'guess': Environment, 'other': Environment}}\n"
    made = environments(tmp_path, write_tokenizer(tmp_path, TEMPLATES["hermes"]), two)
    made.check_rows([Prompt(0, "a", np.zeros(1, np.int32), None, {"number": 1, "environment": "guess"})], "data")
    with pytest.raises(EpisodeError, match=rf"row 4: the column 'environment' {said}.* has guess, other\)"):
        made.check_rows([Prompt(4, "a", np.zeros(1, np.int32), None, row)], "data")


def test_a_run_that_it_ends_has_saved_first() -> None:
    """As for a reward function: `TrainingLoop` knows both by this class."""
    assert issubclass(EpisodeError, RewardError)
