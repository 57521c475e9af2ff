"""Read the data sets of a configuration as the commands that train on them do, to show what a model will see."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from slurm_rlhf.config.evaluation import data_sets
from slurm_rlhf.config.keys import get
from slurm_rlhf.config.schema import Config, Data
from slurm_rlhf.config.schema_jobs import STAGES
from slurm_rlhf.data.prompts import BadRow, prompts_of
from slurm_rlhf.data.rows import KEYS, Row, read_rows
from slurm_rlhf.data.tokenizer import Tokenizer
from slurm_rlhf.errors import ConfigError, cut, shortened
from slurm_rlhf.records import Prompt
from slurm_rlhf.report.page import CHARACTERS, DataView, ShownRow, tokens_within
from slurm_rlhf.rewards.reasoning_gym import KEY as TASKS
from slurm_rlhf.rewards.reasoning_gym import task_rows

_LINES = 5
"""Most rows that are named of those that are left out."""


def views(config: Config, rows: int) -> Iterator[DataView]:
    """Read each data set that the configuration names, for training, evaluation and `generate`, with its first rows.

    Raises UserError.
    """
    model, data = config.actor.model_name_or_path, config.data
    prompts = [("data.prompt_dataset", data.prompt_dataset, model, data.max_samples, data)]
    for one in data_sets(config):
        prompts.append((f"eval.datasets, {one.name}", one.path, model, one.max_samples, one.reading(data)))
    answered = config.generate
    prompts.append(("generate.dataset", answered.dataset, answered.model_name_or_path, answered.max_samples, data))
    trained = {f"{name}.{key}": get(config, f"{name}.{key}") for name in STAGES for key in ("dataset", "eval_dataset")}
    if any([*trained.values(), *data_sets(config), data.prompt_dataset, data.reasoning_gym]) and not model:
        raise ConfigError("actor.model_name_or_path is not set: name the directory of the model, for its tokenizer")
    if data.reasoning_gym:
        yield _prompts(TASKS, data.reasoning_gym, task_rows(data), Tokenizer.load(model), config, data, rows)
    for key, path, directory, most, reading in prompts:
        if path:
            read = [*read_rows(Path(path), most, reading)]
            view = _prompts(key, path, read, Tokenizer.load(directory), config, reading, rows)
            view.dropped += _unread(Path(path), len(read), most, reading)
            yield view
    for key, path in trained.items():
        if path:
            yield _examples(key, Path(path), Tokenizer.load(model), config, rows)


def _prompts(
    key: str, source: str, given: Iterable[tuple[str, Row]], tokenizer: Tokenizer, config: Config, data: Data, rows: int
) -> DataView:
    """Look at prompts, whose responses are sampled; `given`: (place in its file, row) of each."""
    read = [(index, *row) for index, row in enumerate(given)]
    found = list(prompts_of(read, tokenizer, data, data.max_len - config.rollout.max_new_tokens))
    kept = [one for one in found if isinstance(one, Prompt)]
    bad = sorted((one for one in found if isinstance(one, BadRow)), key=lambda one: one.index)
    view = DataView(key, source, [len(prompt.token_ids) for prompt in kept])
    view.facts += _facts("prompts", [prompt.token_ids.tobytes() for prompt in kept], [p.text for p in kept], view)
    long = [one for one in bad if one.long]
    if long:
        places = shortened((read[one.index][1] for one in long), _LINES)
        limit = data.max_len - config.rollout.max_new_tokens
        view.dropped.append(f"{len(long)} longer than {limit} tokens (data.max_len - rollout.max_new_tokens): {places}")
    view.dropped += _refused([str(one.error) for one in bad if not one.long])
    for prompt in kept[:rows]:
        label = "" if prompt.label is None else f", label {cut(repr(prompt.label), 80)}"
        none = [False] * len(prompt.token_ids)
        view.rows.append(_row(f"{read[prompt.index][1]}{label}", prompt.token_ids.tolist(), none, tokenizer))
    return view


def _examples(key: str, path: Path, tokenizer: Tokenizer, config: Config, rows: int) -> DataView:
    """Look at the examples of a stage: prompts with the answers that are trained on."""
    from slurm_rlhf.stages.examples import RefusedRows, of_held_out
    from slurm_rlhf.stages.kinds import stage_trainer

    data = of_held_out(config.data) if key.endswith(".eval_dataset") else config.data
    try:
        examples = stage_trainer(config, key.partition(".")[0]).read(path, tokenizer, data)
    except RefusedRows as error:
        examples = error.examples
    found, width, long, refused = examples.experience, examples.width, examples.dropped, examples.refused
    view = DataView(key, str(path), found.lengths.tolist())
    ids = np.split(found.token_ids, found.token_offsets[1:-1])[: len(found.lengths)]
    masks = np.split(found.action_mask, found.action_offsets[1:-1])
    texts = [tokenizer.decode(ids[first].tolist()) for first in range(0, len(ids), width)]
    view.facts += _facts("examples", examples.contents(), texts, view)
    first = next((row for _, row in read_rows(path, 1, data) if isinstance(row, dict)), {})
    if unread := first.keys() - {getattr(data, key) for key in (*KEYS, "margin_key", "tools_key")}:
        view.facts.append(f"columns that are not read: {', '.join(sorted(unread))}")
    view.facts.append(f"{int(found.action_mask.sum())} of {len(found.token_ids)} tokens are in the loss")
    view.dropped = _unread(path, len(examples) + len(long) + len(refused), data.max_samples, data) + _refused(refused)
    if long:
        places = shortened(long, _LINES)
        view.dropped.append(f"{len(long)} longer than data.max_len = {config.data.max_len} tokens: {places}")
    for place in range(min(rows, len(examples)) * width):
        mask = [False] * int(found.prompt_lens[place]) + masks[place].tolist()
        part = f", answer {place % width + 1} of {width}" if width > 1 else ""
        view.rows.append(_row(f"{examples.places[place // width]}{part}", ids[place].tolist(), mask, tokenizer))
    return view


def _refused(errors: Sequence[str]) -> list[str]:
    """Name the first of the rows that a run refuses."""
    more = [f"and {len(errors) - _LINES} more"] if len(errors) > _LINES else []
    return [*(f"a run refuses it: {error}" for error in errors[:_LINES]), *more]


def _facts(what: str, whole: Sequence[bytes], texts: Sequence[str], view: DataView) -> list[str]:
    """Describe how many there are, how long they are, and those that come twice."""
    lengths, several = view.lengths, Counter(whole)
    lines = [f"{len(whole)} {what}"]
    if lengths:
        lines.append(f"{min(lengths)} to {max(lengths)} tokens, {sum(lengths) / len(lengths):.1f} in the mean")
    repeated = len(whole) - len(several)
    most, count = several.most_common(1)[0] if several else (b"", 1)
    shown = f"; {count} times: {cut(repr(texts[whole.index(most)]), 80)}" if repeated else ""
    return [*lines, f"duplicates: {repeated or 'none'}{shown}"]


def _unread(path: Path, read: int, most: int, data: Data) -> list[str]:
    """Say how many rows data.filter, data.weights and the key of the first rows leave out."""
    if not (data.filter or data.weights or most):
        return []
    every = sum(1 for _ in read_rows(path, 0, replace(data, filter=[], weights=[])))
    taken = sum(1 for _ in read_rows(path, 0, replace(data, weights=[]))) if data.filter else every
    mixed = sum(1 for _ in read_rows(path, 0, data)) if data.weights else taken
    counts = {"data.filter": every - taken, "data.weights": taken - mixed, "max_samples": mixed - read}
    return [f"{count} by {key}" for key, count in counts.items() if count]


def _row(title: str, ids: list[int], loss: list[bool], tokenizer: Tokenizer) -> ShownRow:
    pieces = tokenizer.pieces(ids)
    count = tokens_within(pieces, CHARACTERS)
    return ShownRow(f"{title}, {len(ids)} tokens", pieces[:count], loss[:count], len(ids))
