"""Plays episodes with an environment that fails in every way, without an engine: every turn is `4`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np

from slurm_rlhf.records import STOP, Prompt, Sampling, Trajectory, VersionSpan, digest
from slurm_rlhf.sampling.environment import Environments

FAULTY = """
import os, signal, time

class Environment:
    def __init__(self):
        self.turns = 0

    def reset(self, row):
        self.fault = row["fault"]
        if self.fault == "reset":
            raise ValueError("no reset")

    def step(self, messages):
        self.turns += 1
        if self.turns == 2:
            if self.fault == "raises":
                raise ValueError("no step")
            if self.fault == "hangs":
                time.sleep(3600)
            if self.fault == "nothing":
                return None
            if self.fault == "kills":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.fault == "exits":
                os._exit(3)
        return "1", 1.0, self.turns == 3
"""
FAULTY_EXECUTOR = """
import asyncio
from openrlhf.utils.agent import AgentExecutorBase

class AgentExecutor(AgentExecutorBase):
    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine, images=None):
        if label == "reset":
            raise ValueError("no reset")
        ids, ranges = hf_tokenizer.encode(prompt), []
        for turn in range(3):
            if turn == 2:
                if label == "raises":
                    raise ValueError("no step")
                if label == "hangs":
                    await asyncio.sleep(3600)
                if label == "nothing":
                    return None
            said = (await llm_engine.generate(ids, sampling_params)).outputs[0]
            ranges.append((len(ids), len(ids) + len(said.token_ids)))
            ids = ids + said.token_ids + hf_tokenizer.encode("1") * (turn < 2)
        return {"observation_tokens": ids, "action_ranges": ranges, "reward": 3, "scores": 3, "extra_logs": {}}
"""
"""Fails in the ways of `FAULTY` that leave its process, as an agent file of OpenRLHF."""
FAULTS = ("", "", "", "", "", "", "reset", "raises", "nothing", "kills", "exits")


def played(
    environments: Environments, faults: list[str], before: Callable[[], None] = lambda: None
) -> list[Trajectory]:
    """Play an episode for each fault, all at once; call `before` before each turn."""
    ids = np.array(environments.tokenizer.encode("2+2="), dtype=np.int32)
    prompts = [Prompt(i, "2+2=", ids, f, {"input": "2+2=", "fault": f}, "input") for i, f in enumerate(faults)]

    async def all_of_them() -> list[Trajectory]:
        return list(await asyncio.gather(*(_episode(environments, prompt, before) for prompt in prompts)))

    return asyncio.run(all_of_them())


async def _episode(environments: Environments, prompt: Prompt, before: Callable[[], None]) -> Trajectory:
    ids = np.array(environments.tokenizer.encode("4"), dtype=np.int32)
    floats, mask = np.zeros(1, dtype=np.float32), np.ones(1, dtype=np.bool_)
    playing = environments.begin(prompt, Sampling(max_new_tokens=8), 0)
    try:
        whole = await playing.start()
        while whole is None:
            spans, said = [VersionSpan(0, 1, 0)], environments.tokenizer.decode(ids.tolist())
            answer = Trajectory(prompt.index, 0, ids, ids, floats, mask, STOP, said, spans, digests=[digest(ids)])
            before()
            whole = await playing.take(answer)
        return whole
    finally:
        playing.drop()
