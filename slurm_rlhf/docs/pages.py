"""The pages of the documentation: their topics in reading order, and their texts."""

from __future__ import annotations

import difflib
from pathlib import Path

from slurm_rlhf.docs.keys import key_reference
from slurm_rlhf.errors import ConfigError

TOPICS: dict[str, str] = {
    "first_run": "see it learn, and what a run leaves behind",
    "data_and_reward": "your model, your prompts, your reward function",
    "models": "which models were compared, and the self-check",
    "generate": "answers to a file of prompts",
    "cluster": "Slurm, MPI, containers, networks, does a GPU work",
    "layout": "which role gets which GPUs, and whether it fits",
    "algorithms": "PPO, GRPO and their kin, recipes, an algorithm of your own",
    "asynchronous": "sampling while the actor trains, and its correction",
    "evaluation": "pass@k, majority vote and intervals, and the best checkpoint",
    "weights": "how new weights reach the engines",
    "resume": "time limits, preemption, checkpoints",
    "report": "one page that shows a run, its samples and events",
    "trackers": "TensorBoard, W&B, trackio and MLflow, offline too",
    "trouble": "what you see, and what to do",
    "migration": "from OpenRLHF, verl or TRL",
    "speed": "benches, and the figures of a run",
    "keys": "every key with its type, default and meaning",
    "architecture": "the map of the tree, and how to add things",
}
"""Topic -> what the reader gets, in reading order. Each has a file `<topic>.md` here, but for `keys`."""


def page(topic: str) -> str:
    """Return the Markdown of a page. Raises ConfigError for a topic that is not there, naming the nearest."""
    if topic not in TOPICS:
        near = difflib.get_close_matches(topic, TOPICS, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(f"there is no page {topic!r}; {hint}The pages: {', '.join(TOPICS)}")
    if topic == "keys":
        return key_reference()
    return Path(__file__).with_name(f"{topic}.md").read_text(encoding="utf-8")


def contents() -> str:
    """Return the list of pages, a line each."""
    width = max(map(len, TOPICS))
    return "\n".join(f"  {topic.ljust(width)}  {about}" for topic, about in TOPICS.items())
