"""Describe corrections between engine and trainer as records, without numpy: the planner reads them, too.

A rule says from which ratio a token gets its weight (level), and what happens to a ratio that is out of bounds (mode).
`correction.correct` computes the weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["token", "sequence", "geometric"]
Mode = Literal["truncate", "mask", "clip"]


@dataclass(frozen=True, slots=True)
class CorrectionRule:
    """Say how the ratio of actor to engine becomes the weight of a token."""

    level: Level
    """The ratio: of the token, of its response (product over the actions), or the geometric mean of its response."""
    mode: Mode
    """truncate: at most `high`. clip: into [low, high]. mask: 0 outside of [low, high], else the token's ratio."""
    low: float
    high: float


PRESETS: dict[str, CorrectionRule] = {
    "tis": CorrectionRule("token", "truncate", 0.0, 2.0),
    "icepop": CorrectionRule("token", "mask", 0.5, 5.0),
    "seq_mask": CorrectionRule("geometric", "mask", 0.99, 1.01),
}
"""Name -> rule.

tis: truncated importance sampling. Source: Yao et al., Your Efficient RL Framework Secretly Brings You Off-Policy RL
Training (2025), fengyao.notion.site/off-policy-rl; the bound of verl and slime.
icepop: drops the tokens on which engine and actor disagree. Source: Ling team, Every Step Evolves (2025), arXiv
2510.18855.
seq_mask: drops the responses on which they disagree on average. Source: Trust region masking for long-horizon LLM
reinforcement learning (2025), arXiv 2512.23075; the bounds of SkyRL. OpenRLHF's seq-mask-tis has [0.5, 5] here.
"""
