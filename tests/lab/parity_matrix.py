"""Compare engine, trainer and transformers on tiny random models of known architectures.

    python tests/lab/parity_matrix.py                              # every architecture of the table
    python tests/lab/parity_matrix.py gemma2 mistral --precision=bf16+head

Options are those of `slurm-rlhf check-parity`, which it runs on the models that it makes.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from slurm_rlhf.cli.main import main as slurm_rlhf
from slurm_rlhf.config.architectures import COMPARED

sys.path.append(str(Path(__file__).parents[1] / "support"))

from random_models import make_model

KNOWN = {compared.model_type: name for name, compared in COMPARED.items()}
"""model_type -> class in config.json."""


def main(words: list[str] | None = None) -> int:
    """Make the models, compare, print the table; returns 1 if one does not agree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("architectures", nargs="*", metavar="MODEL_TYPE", help=f"{', '.join(KNOWN)} [all]")
    options, rest = parser.parse_known_args(words)
    if unknown := set(options.architectures) - KNOWN.keys():
        parser.error(f"not in the table of compared architectures: {', '.join(sorted(unknown))}")
    chosen = {name: KNOWN[name] for name in options.architectures or KNOWN}
    with tempfile.TemporaryDirectory(prefix="parity-matrix-") as scratch:
        os.chdir(scratch)
        # The comparison forks, which a process that has computed with torch must not do.
        maker = multiprocessing.get_context("spawn").Process(target=make_models, args=(chosen,))
        maker.start()
        maker.join()
        if maker.exitcode:
            return 1
        return slurm_rlhf(["check-parity", *chosen.values(), *rest])


def make_models(chosen: Mapping[str, str]) -> None:
    """Write a model of each type into the directory that is named with it."""
    for model_type, directory in chosen.items():
        make_model(Path(directory), model_type)


if __name__ == "__main__":
    sys.exit(main())
