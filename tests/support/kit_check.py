"""`kit_check.py MODULE:FUNCTION DIRECTORY`: one check of the acceptance kit; its finding goes to DIRECTORY."""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import signal
import sys
import traceback
from dataclasses import asdict
from pathlib import Path

from kit import Place

LONGEST = 300  # characters of a reason, which is a cell of a table


def main() -> None:
    faulthandler.register(signal.SIGUSR2)
    where, scratch = sys.argv[1].partition(":"), Path(sys.argv[2])
    stated = json.loads((scratch / "place.json").read_text())
    place = Place(**{**stated, "gpus": tuple(stated["gpus"]), "nodes": tuple(stated["nodes"])})
    try:
        answer = asdict(getattr(importlib.import_module(where[0]), where[2])(place))
    except BaseException as error:
        traceback.print_exc()
        said = " ".join(f"{type(error).__name__}: {error}".split())
        answer = {"error": said if len(said) <= LONGEST else f"{said[:LONGEST]} ..."}
    written = scratch / "finding.new"
    written.write_text(json.dumps(answer))
    written.rename(scratch / "finding.json")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # the teardown of torch, NCCL and vLLM can hang, and its result is written


if __name__ == "__main__":
    main()
