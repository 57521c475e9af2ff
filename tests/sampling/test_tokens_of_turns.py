"""Episodes of any tokens and of calls, in real processes: what is trained on is what was sampled, token for token."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_templates import TEMPLATES, write_tokenizer

from slurm_rlhf.config.schema import Config
from slurm_rlhf.data.tokenizer import Tokenizer
from slurm_rlhf.environments.records import CALLS, ToolCall
from slurm_rlhf.environments.tool_calls import without_end
from slurm_rlhf.records import LENGTH, LOST, STOP, Prompt, Sampling, Trajectory, VersionSpan, digest
from slurm_rlhf.sampling.environment import Environments

TURNS = 100_000
TOOL = """
class Environment:
    def reset(self): ...

    def look_up(self, text: str, count: int) -> str:
        '''Looks it up.

        Args:
            text: The words.
            count: How many.
        '''
        return ["12", "error: x", " false", ""][count % 4]
"""
QUESTION = {"role": "user", "content": "How many?"}


def environments(tmp_path: Path, tokenizer: Tokenizer) -> Environments:
    (tmp_path / "tool.py").write_text(TOOL)
    config = Config()
    config.env.path, config.env.workers, config.env.max_turns = str(tmp_path / "tool.py"), 1, 6
    config.data.apply_chat_template, config.data.max_len, config.rollout.max_new_tokens = True, 4000, 400
    return Environments(config, tokenizer)


def sampled(made: Environments, rng: random.Random) -> tuple[Trajectory, bool]:
    """A turn with a call, half of them behind tokens as no encoder would write them; whether the call stands alone."""
    tokenizer, (tools,) = made.tokenizer, made.described.values()
    reader = made.tokens["tools"].reader
    call = ToolCall("look_up", {"text": rng.choice(["a b", "falsE", "ö\n"]), "count": rng.randrange(10**6)})
    asked = tokenizer.chat([QUESTION], tools=tools.schemas)
    written = tokenizer.chat([QUESTION, reader.message("", [call])], tools=tools.schemas, answer=False)[len(asked) :]
    ids = tokenizer.encode(without_end(written, tokenizer), add_special_tokens=False)
    alone = rng.random() < 0.5
    if not alone:
        ids = [rng.randrange(tokenizer.backend.get_vocab_size(with_added_tokens=False)) for _ in range(8)] + ids
    ended = rng.random() < 0.9
    if ended:
        end = "<|call|>" if "<|call|>" in written else "<|end|>"
        ids += tokenizer.encode(end, add_special_tokens=False)
    found = np.array(ids, dtype=np.int32)
    floats, mask = np.zeros(len(ids), dtype=np.float32), np.ones(len(ids), dtype=np.bool_)
    spans, reason = [VersionSpan(0, len(ids), 0)], STOP if ended else LENGTH
    text = tokenizer.decode(ids)
    return Trajectory(0, 0, found, found, floats, mask, reason, text, spans, digests=[digest(found)]), alone


async def play(made: Environments, turns: int, rng: random.Random) -> tuple[int, int]:
    """Play episodes of `turns` turns in all; return how many calls stood alone, and how many were answered."""
    text = made.tokenizer.chat([QUESTION])
    row: dict[str, Any] = {"input": [QUESTION]}
    prompt = Prompt(0, text, np.array(made.tokenizer.encode(text), dtype=np.int32), None, row, "input")
    lone = answered = 0
    while turns > 0:
        episode = made.begin(prompt, Sampling(max_new_tokens=400), 0)
        own: list[Trajectory] = []
        whole = await episode.start()
        before = episode.token_ids.tolist()
        while whole is None:
            found, alone = sampled(made, rng)
            assert episode.token_ids.tolist()[: len(before)] == before
            before = [*episode.token_ids.tolist(), *found.response_ids.tolist()]
            whole = await episode.take(found)
            own.append(found)
            lone += alone
        episode.drop()
        assert whole.finish_reason != LOST
        assert [*whole.prompt_ids.tolist(), *whole.response_ids.tolist()] == before
        assert whole.response_ids[whole.action_mask].tolist() == [i for one in own for i in one.response_ids.tolist()]
        assert whole.digests == [one.digests[0] for one in own]
        answered += whole.counts.get(CALLS, 0)
        turns -= whole.turns
    return lone, answered


def check(tmp_path: Path, name: str, turns: int) -> None:
    made = environments(tmp_path, write_tokenizer(tmp_path, TEMPLATES[name]))
    try:
        lone, answered = asyncio.run(play(made, turns, random.Random(3)))
    finally:
        made.close()
    assert answered >= lone > turns // 3


@pytest.mark.full
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("name", TEMPLATES)
def test_trained_tokens_are_the_sampled_ones_in_many_turns(tmp_path: Path, name: str) -> None:
    check(tmp_path, name, TURNS // len(TEMPLATES))
