"""Batches whose rows are single sequences, which transformers does not know."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor


@contextmanager
def rows_are_sequences() -> Iterator[None]:
    """Within it transformers takes every row for one sequence.

    Without an attention mask it looks at the position ids for sequences packed into a row: it asks the device and waits
    for the answer, behind all that is queued there, once or twice in each forward pass.
    """
    from transformers import masking_utils

    asked, masking_utils.find_packed_sequence_indices = masking_utils.find_packed_sequence_indices, _none_packed
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = asked


def _none_packed(position_ids: Tensor) -> None:
    """Of transformers.masking_utils.find_packed_sequence_indices what it answers when no sequences are packed."""
