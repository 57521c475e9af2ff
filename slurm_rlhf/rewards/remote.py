"""Compute rewards by servers over HTTP: OpenRLHF's request and answer, and with all fields by `serve-reward`.

OpenRLHF: POST {"query", "prompts", "labels"} -> {"rewards", "scores"?, "extra_logs"?}. The request has `items` and
`step` beside them, which its servers ignore; an answer may have `components`, and null where a reward does not apply.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import RewardError, WorkerError
from slurm_rlhf.records import Prompt, Trajectory
from slurm_rlhf.rewards.items import Item, by_prompt, items_of
from slurm_rlhf.rewards.scored import KEYS, Rewards, joined, parse_answer
from slurm_rlhf.workers.http_client import Servers, token_of

AT_ONCE = 32
"""Requests in flight at most."""


class RemoteRewards:
    """Asks servers in turn; requests for the responses to each prompt are in flight together."""

    streams = True
    """The responses to a prompt may be scored while others are sampled."""

    def __init__(self, config: Config, note: Callable[[str], None]) -> None:
        """`note` tells the user that no server answers, and that one does again. Raises ConfigError."""
        reward, self._input_key = config.reward, config.data.input_key
        token, limit_s = token_of(reward.token, "reward.token"), config.timeout.reward
        self.servers = Servers(reward.remote_url, token, note, at_once=AT_ONCE, silence_s=limit_s, total_s=limit_s)

    def close(self) -> None:
        """Give up what is asked, and close the connections."""
        self.servers.close()

    def __call__(self, prompts: list[Prompt], trajectories: list[Trajectory], step: int = 0) -> Rewards:
        """Compute the rewards of `trajectories`, [N]; blocks, also while no server answers.

        Raises RewardError for what a server refuses or answers wrongly.
        """
        items = items_of(prompts, trajectories, self._input_key)
        groups = [[items[place] for place in places] for places in by_prompt(prompts)]
        if not groups:
            return parse_answer([], 0, "the servers")
        return joined(list(self.servers.requests.map(lambda group: self._score(group, step), groups)))

    def _score(self, items: Sequence[Item], step: int) -> Rewards:
        body = {
            "query": [item["prompt"] + item["response"] for item in items],
            "prompts": [item["prompt"] for item in items],
            "labels": [item["label"] for item in items],
            "items": items,
            "step": step,
        }
        try:
            server, answer = self.servers.ask(body)
        except WorkerError as error:
            raise RewardError(str(error)) from error
        if isinstance(answer, dict):
            answer = {name: answer[name] for name in KEYS if name in answer}
        return parse_answer(answer, len(items), server, none=True)
