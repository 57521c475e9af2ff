"""A stand-in for nvidia-smi: a program that answers the queries of `cluster.gpu_query` with given text.

The texts have the format that NVIDIA documents (`nvidia-smi --help-query-gpu`, `--help-query-compute-apps`, csv without
head and units) and that drivers 535 to 580 print.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from programs import write_program

HEAD = (
    "+-----------------------------------------------------------------------------------------+\n"
    "| NVIDIA-SMI {driver}             Driver Version: {driver}     CUDA Version: {cuda}     |\n"
    "|-----------------------------------------+------------------------+----------------------+\n"
)

PROGRAM = """#!/usr/bin/env python3
import json, sys
texts = json.load(open({texts!r}))
for word in sys.argv[1:] or [""]:
    if word.partition("=")[0] in texts:
        sys.stdout.write(texts[word.partition("=")[0]])
sys.exit(texts["code"])
"""


def card(
    index: int, name: str = "NVIDIA H100 80GB HBM3", total: int = 81559, used: int = 4, mig: str = "Disabled"
) -> str:
    """A line of `--query-gpu`."""
    return f"{index}, GPU-{index:08x}-1111-2222-3333-444444444444, {name}, {total}, {used}, 580.95.05, {mig}"


def write_smi(
    directory: Path,
    cards: Sequence[str] = (),
    processes: Sequence[str] = (),
    cuda: str = "13.0",
    code: int = 0,
    said: str = "",
) -> Path:
    """`nvidia-smi` in `directory`, which is to come first on PATH. `said`: what it prints in place of cards."""
    texts = {
        "-L": said
        or "".join(f"GPU {i}: {line.split(', ')[2]} (UUID: {line.split(', ')[1]})\n" for i, line in enumerate(cards)),
        "--query-gpu": said or "".join(f"{line}\n" for line in cards),
        "--query-compute-apps": "".join(f"{line}\n" for line in processes),
        "": said or HEAD.format(driver="580.95.05", cuda=cuda),
        "code": code,
    }
    program = write_program(directory / "nvidia-smi", PROGRAM.format(texts=str(directory / "smi.json")))
    (directory / "smi.json").write_text(json.dumps(texts))
    return program
