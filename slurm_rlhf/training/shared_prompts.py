"""Responses to one prompt in one row behind it, so that a pass computes the prompt once for all of them.

    row        p1 p2 p3 | a1 a2 | b1 b2 b3     responses a1 a2 a3 and b1 b2 b3 b4, whose last predict nothing
    positions   0  1  2 |  3  4 |  3  4  5

Every token sees the prompt and its own response: log-probs and gradients are those of separate rows but for rounding.
Of a group of eight with responses shorter than their prompt, half of the arithmetic is left. Source of the idea: Liu et
al., Prefix Grouper (2025), arXiv 2506.05433.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from slurm_rlhf.algorithms.batching import same_prompts
from slurm_rlhf.errors import ModelError
from slurm_rlhf.records import Bool, Experience

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Layout:
    """Says in which row each sequence is, and where in it its response begins."""

    rows: list[list[int]]  # sequences of each row; all have the same prompt
    row: Ints  # [N]
    start: Ints  # [N]
    width: int  # tokens of the longest row

    def cost(self, hidden: int, masked: bool) -> float:
        """Estimate the work of a pass, padding included, in pairs of tokens that attention compares.

        A layer of a transformer of size H takes about 24 H^2 operations for a token and 4 H for a pair. With a mask of
        its own attention computes all pairs of a row, else the half that causality leaves.
        """
        return len(self.rows) * (6.0 * hidden * self.width + self.width**2 * (1.0 if masked else 0.5))


def tokens_read(exp: Experience) -> Ints:
    """Count the tokens of each response that a model has to read, [N]: from the last one nothing is predicted."""
    return np.maximum(exp.response_lens.astype(np.int64) - 1, 0)


def plain(exp: Experience, whole: bool = False) -> Layout:
    """Give every sequence a row of its own; with `whole`, one that has its last token, too."""
    count, prompts = len(exp), exp.prompt_lens.astype(np.int64)
    lengths = exp.lengths if whole else prompts + tokens_read(exp)
    return Layout([[number] for number in range(count)], np.arange(count), prompts, int(lengths.max(initial=1)))


def share(exp: Experience, hidden: int) -> Layout | None:
    """Put responses to equal prompts into one row while that is less work; None: it is not, on the whole.

    `hidden`: size of the model's states, by which tokens are dear or attention is. Deterministic.
    """
    found = _layout([row for group in same_prompts(exp) for row in _rows(group, exp, hidden)], exp)
    return found if found.cost(hidden, masked=True) < plain(exp).cost(hidden, masked=False) else None


def one_row(exp: Experience) -> Layout:
    """Put all sequences, whose prompts are equal, into one row."""
    return _layout([list(range(len(exp)))], exp)


def _layout(rows: list[list[int]], exp: Experience) -> Layout:
    place, start = np.zeros(len(exp), dtype=np.int64), np.zeros(len(exp), dtype=np.int64)
    width, own = 1, tokens_read(exp)
    for number, members in enumerate(rows):
        end = int(exp.prompt_lens[members[0]])
        for member in members:
            place[member], start[member] = number, end
            end += int(own[member])
        width = max(width, end)
    return Layout(rows, place, start, width)


def _rows(group: Sequence[int], exp: Experience, hidden: int) -> list[list[int]]:
    """Cut a group into rows: a response joins the row before it while attention to that costs less than its prompt."""
    prompt = int(exp.prompt_lens[group[0]])
    rows: list[list[int]] = []
    length, read = 0, tokens_read(exp)
    for member in group:
        own = int(read[member])
        beside = 6.0 * hidden * own + 2.0 * length * own + own**2
        alone = 6.0 * hidden * (prompt + own) + 0.5 * (prompt + own) ** 2
        if rows and beside < alone:
            rows[-1].append(member)
            length += own
        else:
            rows.append([member])
            length = prompt + own
    return rows


def attention_mask(exp: Experience, layout: Layout) -> Bool:
    """Say what each token sees, [rows, 1, width, width]: the prompt and its own response, up to itself."""
    segment = np.full((len(layout.rows), layout.width), -1, dtype=np.int64)  # 0: the prompt, -1: padding
    own = tokens_read(exp)
    for number, members in enumerate(layout.rows):
        segment[number, : exp.prompt_lens[members[0]]] = 0
        for count, member in enumerate(members, start=1):
            begin = layout.start[member]
            segment[number, begin : begin + own[member]] = count
    sees = (segment[:, None, :] == 0) | (segment[:, None, :] == segment[:, :, None])
    found: Bool = (sees & np.tri(layout.width, dtype=np.bool_))[:, None]
    return found


def check_model(model: Any, max_len: int, path: str) -> None:
    """Refuse a model in which tokens see something else than the tokens before them. Raises ModelError.

    `max_len`: tokens of the longest text of the run.
    """
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"]) - {"full_attention"}
    window = getattr(config, "sliding_window", None)
    if window and getattr(config, "use_sliding_window", True) and window < max_len and not kinds:
        kinds = {f"a window of {window} tokens"}
    if kinds:
        raise ModelError(
            f"train.share_prompts: {path} has {', '.join(sorted(kinds))}, and only full attention is known to leave "
            "other responses of a row out: leave the key out"
        )


def check_equal(separate: Tensor, shared: Tensor, half: bool, path: str) -> None:
    """Compare log-probs of the same tokens, computed in both ways. Raises ModelError where the model mixes rows."""
    most = float((separate - shared).abs().max())
    if not most <= (0.1 if half else 1e-3):
        raise ModelError(
            f"train.share_prompts: {path} gives log-probs that differ by {most:.2g} where responses stand behind one "
            "prompt: its layers see more than their attention mask says. Leave the key out."
        )


def probe() -> Experience:
    """Make two responses to one prompt, of small tokens, for `check_equal`."""
    tokens = np.array([1, 2, 3, 4, 5, 1, 2, 3, 6, 7, 2], dtype=np.int32)
    lens = np.array([3, 3], dtype=np.int32), np.array([2, 3], dtype=np.int32)
    return Experience(*lens, tokens, np.ones(5, dtype=np.bool_), np.zeros(2, dtype=np.float32))
