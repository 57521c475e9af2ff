"""Environments as a user writes them, and their instances as a worker plays them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from slurm_rlhf.environments.kinds import Instances
from slurm_rlhf.environments.records import Answer, Begun, EnvironmentInfo, Start, Turn

TOOLS = '''
import asyncio

class Counter:
    """Counts, as an environment of TRL does."""

    def reset(self, by: int = 1, **columns) -> str | None:
        self.count, self.by = 0, by
        return columns.get("hint")

    def add(self, times: int, names: list[str] | None = None) -> str:
        """
        Adds to the count.

        Args:
            times: How often.
            names: Names of those who count.

        Returns:
            The count.
        """
        if times > 100:
            raise (ValueError if times == 101 else SystemExit)("too often")
        self.count += times * self.by
        return {(times,): 1} if times == 100 else str(self.count)

    async def wait(self) -> dict[str, int]:
        """Waits."""
        await asyncio.sleep(0)
        return {chr(0xDC80): self.count}

    def get_reward(self) -> float:
        return self.count / 10

    def _hidden(self): ...
'''


class Typed:
    """Calls `Instances` with records; to and fro they are plain values, as between processes."""

    def __init__(self, file: Path, *arguments: str) -> None:
        self.instances = Instances(str(file), arguments)

    def describe(self) -> dict[str, EnvironmentInfo]:
        return msgspec.convert(self.instances.describe(), dict[str, EnvironmentInfo])

    def begin(self, number: int, start: Start) -> Begun:
        return msgspec.convert(self.instances.begin(number, msgspec.to_builtins(start)), Begun)

    def turn(self, number: int, turn: Turn) -> Answer:
        return msgspec.convert(self.instances.turn(number, msgspec.to_builtins(turn)), Answer)

    def end(self, number: int) -> Answer:
        answer = msgspec.convert(self.instances.end(number), Answer)
        self.instances.drop(number)
        return answer


def instances(tmp_path: Path, code: str, name: str = "", *arguments: str) -> Typed:
    (tmp_path / "game.py").write_text(code)
    return Typed(tmp_path / f"game.py{name and ':'}{name}", *arguments)


def start(**row: Any) -> Start:
    return Start(row, row.get("label"), [{"role": "user", "content": "hi"}], "<hi>")
