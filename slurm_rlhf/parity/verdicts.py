"""Find the models to compare and make prompts; judge how far apart log-probs are, and show that as a table."""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any, Literal

import numpy as np

from slurm_rlhf.config.model_directory import check_architecture, check_length, check_model_directory, read_config
from slurm_rlhf.config.user_data import download, is_hub_name
from slurm_rlhf.data.tokenizer import Tokenizer
from slurm_rlhf.errors import ConfigError, ModelError
from slurm_rlhf.eval.verdicts import BOUNDS
from slurm_rlhf.observe.run_status import finite
from slurm_rlhf.records import F32, I32


@dataclass(frozen=True, slots=True)
class Apart:
    """Say how far apart two sides are: |difference of log-probs| in nats over the tokens."""

    largest: float
    mean: float


@dataclass(frozen=True, slots=True)
class Line:
    """Name a model to compare, and hold the result in one precision."""

    model: str  # as the user named it
    precision: str = ""  # a key of PRECISIONS; empty if nothing was computed
    verdict: str = ""  # one of VERDICTS; empty: it is to be compared
    reason: str = ""  # why the verdict is not AGREE
    tokens: int = 0
    apart: Mapping[str, Apart] = field(default_factory=dict)  # "vllm-trainer" -> ...
    architecture: str = ""  # class in config.json
    log: tuple[str, ...] = ()  # last lines of its log if it failed
    directory: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return plain data without NaN or infinity, which JSON lacks."""
        plain = asdict(self)
        plain["apart"] = {name: {k: finite(v) for k, v in asdict(pair).items()} for name, pair in self.apart.items()}
        return plain


def model(name: str, max_len: int) -> Line:
    """Find the model `name`: a directory, or OWNER/NAME on the hub, which is downloaded if necessary.

    A model that cannot be trained is REFUSED, a model that cannot be downloaded FAILED. Raises ConfigError for a name
    that is neither.
    """
    if Path(name).is_dir():
        directory = str(Path(name).absolute())
    elif is_hub_name(name):
        try:
            directory = download(name)
        except ModelError as error:
            return Line(name, verdict=FAILED, reason=str(error).removeprefix(f"{name}: "))
    else:
        raise ConfigError(
            f"{name}: no such directory, and no name of a model on the Hugging Face hub (OWNER/NAME): give one of them"
        )
    try:
        check_model_directory(name, directory, tokenizer=True)
        check_length(name, directory, max_len)
        check_architecture(name, directory, sampled_len=max_len)
    except ModelError as error:
        reason = str(error).removeprefix(f"{name}: ").replace("data.max_len", "--max_len")
        return Line(name, verdict=REFUSED, reason=reason, directory=directory)
    names = read_config(name, Path(directory)).get("architectures") or [""]
    return Line(name, architecture=str(names[0]), directory=directory)


TEMPERATURE = 0.9
NEW_TOKENS = 24
SAMPLES = 2
"""Responses to each prompt: for the second one, the prompt is in the prefix cache."""

FEWEST = 16
"""Fewest tokens that a tokenizer may make of the text below."""

TEXT = """A cluster has a queue and every user of it knows two numbers: how long a job may run, and how long it waits.
When 7 people share 8 cards, the arithmetic is simple; with 300 people and 96 nodes it is a matter of policy. So the
scheduler keeps an account: who asked for what, who used how much, and who has waited since Monday. A job that names
its needs well, say 4 nodes for 90 minutes, slips into a gap that a careless one cannot fill. In the evening the gaps
are larger, and a patient program that saves its state, ends when it is asked to, and begins again where it was, will
find 2 hours here and 3 hours there, until its work is done. """


def prompts(tokenizer: Tokenizer, max_len: int) -> list[I32]:
    """Cut prompts of different lengths out of a text, from one token up to `max_len` less the tokens of a response.

    Raises ModelError for a tokenizer that makes hardly any tokens of a text.
    """
    text = TEXT.replace("\n", " ")
    ids = tokenizer.encode(text)
    if len(ids) < FEWEST:
        raise ModelError(f"its tokenizer makes {len(ids)} tokens of an English text of {len(text)} characters")
    while len(ids) < max_len:
        text += text
        ids = tokenizer.encode(text)
    longest = max_len - NEW_TOKENS
    lengths = sorted({min(length, longest) for length in (1, 5, 17, 33, longest * 5 // 8, longest * 7 // 8)})
    return [np.array(ids[:length], dtype=np.int32) for length in lengths]


ENGINE, TRAINER, PLAIN = "vllm", "trainer", "hf"
SIDES = (ENGINE, TRAINER, PLAIN)
PAIRS = {"-".join(pair): pair for pair in combinations(SIDES, 2)}

FP32_BOUND = 1e-5
"""Most nats by which rounding changes a log-prob in fp32."""

AGREE, DIFFER = "agree", "differ"
REFUSED, FAILED = "refused", "failed"
VERDICTS = (AGREE, DIFFER, REFUSED, FAILED)
"""In this order: equal except for rounding; further apart; known not to work, so not computed; not computable."""


@dataclass(frozen=True, slots=True)
class Precision:
    """Name a precision, as `--precision` takes it."""

    name: str
    dtype: Literal["bf16", "fp16", "fp32"]  # as ds.param_dtype
    fp32_head: bool = False  # as ds.fp32_lm_head

    def bound(self) -> tuple[float, str]:
        """Return the limit in nats and what it limits, "largest" or "mean".

        In 16 bits single tokens may be tenths of a nat apart, so the limit is that of a run's self-check.
        """
        if self.dtype == "fp32":
            return FP32_BOUND, "largest"
        known = BOUNDS[self.dtype]["engine"]
        return known.limit, known.statistic


PRECISIONS = {
    each.name: each
    for each in (
        Precision("fp32", "fp32"),
        Precision("bf16", "bf16"),
        Precision("bf16+head", "bf16", fp32_head=True),
        Precision("fp16", "fp16"),
    )
}


def differences(logprobs: Mapping[str, F32]) -> dict[str, Apart]:
    """Compare each pair of sides; `logprobs`: side -> [A], for the same tokens, at least one."""
    found = {}
    for name, (one, other) in PAIRS.items():
        gaps = np.abs(logprobs[one].astype(np.float64) - logprobs[other].astype(np.float64))
        found[name] = Apart(float(gaps.max()), float(gaps.mean()))
    return found


def judge(apart: Mapping[str, Apart], precision: Precision) -> tuple[str, str]:
    """Return AGREE, or DIFFER with the reason."""
    limit, statistic = precision.bound()
    figures = {name: getattr(pair, statistic) for name, pair in apart.items()}
    beyond = [name for name, figure in figures.items() if not figure < limit]  # NaN is beyond it
    if not beyond:
        return AGREE, ""
    worst = max(beyond, key=lambda name: math.inf if math.isnan(figures[name]) else figures[name])
    return DIFFER, (
        f"{worst}: {figures[worst]:.2g} nats ({statistic}; rounding makes at most {limit:g}){_odd_one(figures, limit)}"
    )


HINTS = {
    ENGINE: "vLLM computes this model differently from transformers: use another model",
    TRAINER: "the trainer computes it differently from transformers: try another ds.attn_implementation",
    PLAIN: "engine and trainer agree, which is what training needs; only plain transformers (eager attention) differs",
}


def _odd_one(figures: Mapping[str, float], limit: float) -> str:
    """Say which side differs from the two others, if those agree."""
    for side in SIDES:
        others = next(name for name, pair in PAIRS.items() if side not in pair)
        if figures[others] < limit:
            return f". {HINTS[side]}"
    return ". No two of them agree"


_FIGURE = 7
_PAIR = 2 * _FIGURE + 1
_PRECISION = max(map(len, PRECISIONS))


def name_width(subjects: Sequence[Line]) -> int:
    """Return the width of the column of names."""
    return max([len(_label(subject.model, subject.architecture)) for subject in subjects] + [5])


def head(width: int) -> str:
    """Return the two header lines of the table: the pairs, and the columns of each."""
    pairs = "  ".join(column.center(_PAIR) for column in PAIRS)
    below = "  ".join(f"{'max':>{_FIGURE}} {'mean':>{_FIGURE}}" for _ in PAIRS)
    titles = f"{'model':{width}}  {'precision':{_PRECISION}}  {'tokens':>6}"
    return f"{'nats apart:':>{len(titles)}}  {pairs}\n{titles}  {below}  verdict"


def row(line: Line, width: int, first: bool) -> str:
    """Format a line of the table; only the `first` one of a model shows its name."""
    name = _label(line.model, line.architecture) if first else ""
    start = f"{name:{width}}  {line.precision:{_PRECISION}}  {line.tokens or '-':>6}"
    pairs = [line.apart.get(column) for column in PAIRS]
    cells = [f"{_figure(p.largest)} {_figure(p.mean)}" if p else f"{'-':>{_FIGURE}} {'-':>{_FIGURE}}" for p in pairs]
    return f"{start}  {'  '.join(cells)}  {line.verdict}"


def _label(name: str, architecture: str) -> str:
    return f"{name} ({architecture})" if architecture and architecture != name else name


def _figure(value: float) -> str:
    return f"{value:>{_FIGURE}.1e}" if math.isfinite(value) else f"{'NaN':>{_FIGURE}}"


def reasons(lines: Sequence[Line], width: int) -> str:
    """Explain each line that does not agree, with the last lines of its log; empty if all agree."""
    found = []
    for line in lines:
        if line.verdict != AGREE:
            where = f"{line.model}, {line.precision}" if line.precision else line.model
            found.append(textwrap.fill(f"{where}: {line.verdict}: {line.reason}", width, subsequent_indent="  "))
            found += [f"    {text}" for text in line.log]
    return "\n".join(found)


def summary(lines: Sequence[Line]) -> str:
    """Count the verdicts: `11 agree, 1 differ, 2 refused`."""
    counted = Counter(line.verdict for line in lines)
    return ", ".join(f"{counted[verdict]} {verdict}" for verdict in VERDICTS if counted[verdict])
