"""Run `slurm-rlhf check-parity MODEL`: do vLLM, transformers and the trainer compute the same log-probs?"""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

from slurm_rlhf.cli.main import WIDEST, Command, number, take_options, unknown
from slurm_rlhf.errors import ConfigError, printable

if TYPE_CHECKING:
    from slurm_rlhf.parity.processes import Options
    from slurm_rlhf.parity.verdicts import Line, Subject

USAGE = "usage: slurm-rlhf check-parity MODEL ... [--OPTION=VALUE ...] [--json]"
OPTIONS = {
    "precision": "fp32, bf16, fp16, bf16+head (ds.fp32_lm_head); several are joined by commas [fp32,bf16]",
    "max_len": "tokens of the longest text; make it longer than the model's sliding window [320]",
    "timeout": "seconds for one model [600]",
    "json": "print one JSON object at the end, and nothing before",
}
SWITCHES = ("json",)


def run(words: list[str]) -> int:
    """Compare, and print the table; 1 if models differ, fail or are refused. Raises UserError."""
    from slurm_rlhf.parity.verdicts import AGREE, model

    given, names = take_options(words, OPTIONS, USAGE, SWITCHES)
    if not names:
        raise ConfigError(f"check-parity: name a model\n{USAGE}")
    options = _options(given)
    subjects = [model(name, options.max_len) for name in dict.fromkeys(names)]
    return int(any(line.verdict != AGREE for line in _compared(subjects, options, "json" in given)))


def _options(given: dict[str, str]) -> Options:
    from slurm_rlhf.parity.processes import Options
    from slurm_rlhf.parity.verdicts import NEW_TOKENS, PRECISIONS

    precisions = tuple(dict.fromkeys(filter(None, given.get("precision", "fp32,bf16").split(","))))
    for name in precisions:
        if name not in PRECISIONS:
            raise ConfigError(f"--precision: unknown {unknown(name, PRECISIONS)} (valid: {', '.join(PRECISIONS)})")
    max_len = number("max_len", given.get("max_len", "320"), least=2 * NEW_TOKENS)
    return Options(precisions, max_len, number("timeout", given.get("timeout", "600"), float))


def _compared(subjects: list[Subject], options: Options, as_json: bool) -> list[Line]:
    """Compare, and print lines as soon as they are known, or one JSON object at the end."""
    from slurm_rlhf.parity.processes import compare
    from slurm_rlhf.parity.verdicts import Table, reasons, summary

    if as_json:
        lines = list(compare(subjects, options))
        print(json.dumps({"lines": [line.to_json() for line in lines]}, allow_nan=False))
        return lines
    table = Table(subjects, options.precisions)
    print(table.head(), flush=True)
    lines = []
    for line in compare(subjects, options):
        print(printable(table.row(line, first=not lines or lines[-1].model != line.model)), flush=True)
        lines.append(line)
    if why := reasons(lines, min(shutil.get_terminal_size((WIDEST, 24)).columns, WIDEST)):
        print(f"\n{printable(why)}")
    print(f"\n{summary(lines)}")
    return lines


COMMANDS = {
    "check-parity": Command(
        USAGE,
        "Compares the log-probs that vLLM, plain transformers (hf) and the trainer compute for the same tokens, which "
        "vLLM samples: if they differ, training goes wrong without an error. MODEL is a directory, or OWNER/NAME on "
        "the Hugging Face hub. Prints for each model and precision how far apart each two of the three are in nats "
        "(max and mean over the tokens), and a verdict: fp32 agrees below 1e-5 in every token, 16 bits within the "
        "bound of a run's self-check (bf16: 0.02 in the mean). Each model has processes and a time limit of its own. "
        "Uses GPU 0 if there are GPUs, which must have space for the model once. Exit code 0: all agree; 1: a model "
        "differs, fails, or is refused.",
        run,
        OPTIONS,
    ),
}
