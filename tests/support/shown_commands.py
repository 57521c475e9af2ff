"""The commands that the documentation shows."""

from __future__ import annotations

from pathlib import Path

import slurm_rlhf
from slurm_rlhf.docs.pages import TOPICS, page

ROOT = Path(slurm_rlhf.__file__).parents[1]
TEXTS = {"README": (ROOT / "README.md").read_text(encoding="utf-8")} | {topic: page(topic) for topic in TOPICS}
"""Page -> its text."""


def shown(command: str) -> list[str]:
    """Return the words behind `slurm-rlhf` of a command; it has to stand in the documentation."""
    assert any(f"slurm-rlhf {command}" in text for text in TEXTS.values()), command
    return command.replace("[", "").replace("]", "").split()
