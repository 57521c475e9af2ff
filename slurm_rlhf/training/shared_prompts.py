"""Responses to one prompt behind it, and several prompts in a row: a prompt is computed once, and little padding.

    row        p1 p2 p3 | a1 a2 | b1 b2 b3 | q1 q2 | c1     p: a prompt with responses a1 a2 a3 and b1 b2 b3 b4, whose
    positions   0  1  2 |  3  4 |  3  4  5 |  0  1 |  2     last tokens predict nothing; q: the next one

Every token sees its prompt and its own response: log-probs and gradients are those of separate rows but for rounding.
Of a group of eight with responses shorter than their prompt, half of the arithmetic is left. Source of the idea: Liu et
al., Prefix Grouper (2025), arXiv 2506.05433; of rows that are equally long: Graham's longest processing time first
(Bounds on Multiprocessing Timing Anomalies, 1969).
"""

from __future__ import annotations

import heapq
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
    """Says in which row each sequence is, and where in it its prompt and its response begin."""

    rows: list[list[int]]  # sequences of each row
    row: Ints  # [N]
    prompt: Ints  # [N]: equal for sequences that share one
    start: Ints  # [N]
    width: int  # tokens of the longest row

    def cost(self, hidden: int, masked: bool) -> float:
        """Estimate the work of a pass, as `cost` does."""
        return cost(len(self.rows), self.width, hidden, masked)


def cost(rows: int, width: int, hidden: int, masked: bool) -> float:
    """Estimate the work of a pass over `rows` of `width` tokens, in pairs of tokens that attention compares.

    A layer of a transformer of size H takes about 24 H^2 operations for a token and 4 H for a pair. With a mask of
    its own attention computes all pairs of a row, else the half that causality leaves.
    """
    return rows * (6.0 * hidden * width + width**2 * (1.0 if masked else 0.5))


def tokens_read(exp: Experience) -> Ints:
    """Count the tokens of each response that a model has to read, [N]: from the last one nothing is predicted."""
    return np.maximum(exp.response_lens.astype(np.int64) - 1, 0)


def plain(exp: Experience, whole: bool = False) -> Layout:
    """Give every sequence a row of its own; with `whole`, one that has its last token, too."""
    count, prompts = len(exp), exp.prompt_lens.astype(np.int64)
    lengths = exp.lengths if whole else prompts + tokens_read(exp)
    rows = [[number] for number in range(count)]
    return Layout(rows, np.arange(count), np.zeros_like(prompts), prompts, int(lengths.max(initial=1)))


def share(exp: Experience, hidden: int) -> Layout | None:
    """Put responses to equal prompts behind one, and prompts into rows, while it is less work; None: it is not at all.

    `hidden`: size of the model's states, by which tokens are dear or attention is. A row is no longer than that, but
    where a prompt with its responses is. Deterministic.
    """
    blocks = [block for group in same_prompts(exp) for block in _blocks(group, exp, hidden)]
    own = tokens_read(exp)
    lengths = [int(exp.prompt_lens[block[0]]) + int(own[block].sum()) for block in blocks]
    widest = max([hidden, *lengths])
    best, least = [[number] for number in range(len(blocks))], cost(len(blocks), max(lengths, default=1), hidden, True)
    for count in dict.fromkeys(-(-len(blocks) // fold) for fold in range(2, len(blocks) + 1)):
        rows = level(lengths, count)
        width = max(sum(lengths[number] for number in row) for row in rows)
        if width > widest:
            break
        if (needed := cost(count, width, hidden, True)) < least:
            best, least = rows, needed
    if least >= plain(exp).cost(hidden, masked=False):
        return None
    return _layout([[blocks[number] for number in row] for row in best], exp)


def one_row(exp: Experience) -> Layout:
    """Put all sequences into one row, those with equal prompts behind one."""
    return _layout([same_prompts(exp)], exp)


def level(lengths: Sequence[int], count: int) -> list[list[int]]:
    """Deal numbers of `lengths` to `count` rows so that the longest is short: each, longest first, to the shortest row.

    Returns positions in `lengths`. The longest row has at most 4/3 of the least possible (Graham, 1969).
    """
    rows: list[list[int]] = [[] for _ in range(count)]
    filled = [(0, number) for number in range(count)]
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        length, number = heapq.heappop(filled)
        rows[number].append(place)
        heapq.heappush(filled, (length + lengths[place], number))
    return rows


def _layout(rows: list[list[list[int]]], exp: Experience) -> Layout:
    """Lay out rows of blocks of sequences; those of a block have the same prompt."""
    place, prompt, start = (np.zeros(len(exp), dtype=np.int64) for _ in range(3))
    width, own = 1, tokens_read(exp)
    for number, blocks in enumerate(rows):
        end = 0
        for block in blocks:
            place[block], prompt[block] = number, end
            end += int(exp.prompt_lens[block[0]])
            for member in block:
                start[member] = end
                end += int(own[member])
        width = max(width, end)
    return Layout([[member for block in blocks for member in block] for blocks in rows], place, prompt, start, width)


def _blocks(group: Sequence[int], exp: Experience, hidden: int) -> list[list[int]]:
    """Cut a group into blocks: a response joins the one before while attention to that costs less than its prompt."""
    prompt = int(exp.prompt_lens[group[0]])
    blocks: list[list[int]] = []
    length, read = 0, tokens_read(exp)
    for member in group:
        own = int(read[member])
        beside = 6.0 * hidden * own + 2.0 * length * own + own**2
        alone = 6.0 * hidden * (prompt + own) + 0.5 * (prompt + own) ** 2
        if blocks and beside < alone:
            blocks[-1].append(member)
            length += own
        else:
            blocks.append([member])
            length = prompt + own
    return blocks


def attention_mask(exp: Experience, layout: Layout) -> Bool:
    """Say what each token sees, [rows, 1, width, width]: its prompt and its own response, up to itself."""
    block = np.full((len(layout.rows), layout.width), -1, dtype=np.int64)  # where a token's prompt begins, -1: padding
    response = np.zeros_like(block)  # 0: the prompt
    own = tokens_read(exp)
    for number, members in enumerate(layout.rows):
        for count, member in enumerate(members, start=1):
            first, begin = int(layout.prompt[member]), int(layout.start[member])
            block[number, first : first + exp.prompt_lens[member]] = first
            block[number, begin : begin + own[member]] = first
            response[number, begin : begin + own[member]] = count
    sees = (response[:, None, :] == 0) | (response[:, None, :] == response[:, :, None])
    sees &= block[:, None, :] == block[:, :, None]
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
    """Make two responses to one prompt, and one to another, of small tokens, for `check_equal`."""
    tokens = np.array([1, 2, 3, 4, 5, 1, 2, 3, 6, 7, 2, 5, 4, 3, 1], dtype=np.int32)
    lens = np.array([3, 3, 2], dtype=np.int32), np.array([2, 3, 2], dtype=np.int32)
    return Experience(*lens, tokens, np.ones(7, dtype=np.bool_), np.zeros(3, dtype=np.float32))
