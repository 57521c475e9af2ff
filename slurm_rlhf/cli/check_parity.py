"""Run `slurm-rlhf check-parity MODEL`: do vLLM, transformers and the trainer compute the same log-probs?"""

from __future__ import annotations

import json
import math
import shutil
from typing import TYPE_CHECKING

from slurm_rlhf.cli.main import WIDEST, Command, take_options, unknown
from slurm_rlhf.errors import ConfigError, printable

if TYPE_CHECKING:
    from slurm_rlhf.parity.processes import Options
    from slurm_rlhf.parity.subjects import Subject
    from slurm_rlhf.parity.verdicts import Line

USAGE = "usage: slurm-rlhf check-parity MODEL ... [--OPTION=VALUE ...] [--json]"
OPTIONS = {
    "precision": "fp32, bf16, fp16, bf16+head (ds.fp32_lm_head), several with commas [fp32,bf16]",
    "max_len": "tokens of the longest text; make it longer than the model's sliding window [320]",
    "fp32_bound": "nats that fp32 may be apart at most, in any token [1e-5]",
    "seed": "of the samples [1]",
    "timeout": "seconds for one model [600]",
    "json": "print one JSON object at the end, and nothing before",
}
SWITCHES = ("json",)


def run(words: list[str]) -> int:
    """Compare, print the table; 1 if something differs or fails or a named model is refused. Raises UserError."""
    from slurm_rlhf.parity.subjects import model
    from slurm_rlhf.parity.verdicts import AGREE

    given, names = take_options(words, OPTIONS, USAGE, SWITCHES)
    if not names:
        raise ConfigError(f"check-parity: name a model\n{USAGE}")
    options = _options(given)
    subjects = [model(name, options.max_len) for name in dict.fromkeys(names)]
    return int(any(line.verdict != AGREE for line in _compared(subjects, options, "json" in given)))


def _options(given: dict[str, str]) -> Options:
    from slurm_rlhf.parity.processes import Options
    from slurm_rlhf.parity.subjects import NEW_TOKENS
    from slurm_rlhf.parity.verdicts import PRECISIONS

    default = Options()
    precisions = tuple(filter(None, given.get("precision", ",".join(default.precisions)).split(",")))
    for name in precisions:
        if name not in PRECISIONS:
            raise ConfigError(f"--precision: unknown {unknown(name, PRECISIONS)} (valid: {', '.join(PRECISIONS)})")
    return Options(
        tuple(dict.fromkeys(precisions)),
        int(_number(given, "max_len", default.max_len, 2 * NEW_TOKENS, whole=True)),
        int(_number(given, "seed", default.seed, 0, whole=True)),
        _number(given, "fp32_bound", default.fp32_bound, 0),
        _number(given, "timeout", default.timeout_s, 1),
    )


def _number(given: dict[str, str], name: str, default: float, least: float, whole: bool = False) -> float:
    text = given.get(name)
    if text is None:
        return default
    try:
        value = int(text) if whole else float(text)
    except ValueError:
        value = math.nan
    if not least <= value < math.inf:
        kind = "a whole number" if whole else "a number"
        raise ConfigError(f"--{name} takes {kind} of at least {least:g}, got {text!r}\n{USAGE}")
    return value


def _compared(subjects: list[Subject], options: Options, as_json: bool) -> list[Line]:
    """Compare, and print: lines as they are known, or one JSON object at the end."""
    from slurm_rlhf.parity.processes import compare
    from slurm_rlhf.parity.verdicts import Table, reasons, summary

    table = Table(subjects, options.precisions)
    if not as_json:
        print(table.head(), flush=True)
    lines: list[Line] = []
    for line in compare(subjects, options):
        if not as_json:
            print(printable(table.row(line, first=not lines or lines[-1].model != line.model)), flush=True)
        lines.append(line)
    if as_json:
        print(json.dumps({"lines": [line.to_json() for line in lines]}, allow_nan=False))
        return lines
    if told := reasons(lines, min(shutil.get_terminal_size((WIDEST, 24)).columns, WIDEST)):
        print(f"\n{printable(told)}")
    print(f"\n{summary(lines)}")
    return lines


COMMANDS = {
    "check-parity": Command(
        USAGE,
        "Compares the log-probs that vLLM, plain transformers (hf) and the trainer compute for the same tokens, which "
        "vLLM samples: if they are not the same, training goes wrong without an error. MODEL is a directory or "
        "OWNER/NAME on the Hugging Face hub. For each model and precision, how far each two of them are apart in nats "
        "(max and mean over the tokens) and a verdict: fp32 agrees below 1e-5 in every token, 16 bits within the bound "
        "of a run's self-check (bf16: 0.02 in the mean). Each model has a process and a time limit of its own. Takes "
        "GPU 0 where there are GPUs, and room for the model once at a time. Exit code 0: all agree; 1: one does not, "
        "failed, or is refused.",
        run,
        OPTIONS,
    ),
}
