"""Writes GSM8K's questions as prompts with their answers as labels.

    python sbatch/gsm8k_data.py DIRECTORY

Reads the first file in or below DIRECTORY of each part, train*.jsonl or .parquet and test*.jsonl or .parquet, with the
columns `question` and `answer`, as the hub has them. Writes DIRECTORY/train.jsonl and DIRECTORY/eval.jsonl, with the
columns `input` and `label`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ASK = "{} Think step by step, and end with the answer behind ####."


def rows(file: Path) -> list[dict[str, Any]]:
    if file.suffix == ".parquet":
        try:
            import pyarrow.parquet
        except ImportError:
            sys.exit(f"gsm8k_data: {file} is Parquet: pip install pyarrow, or put the rows into a JSONL file")

        return list(pyarrow.parquet.read_table(file).to_pylist())
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line]


def find(directory: Path, part: str) -> Path:
    files = [file for end in ("parquet", "jsonl") for file in sorted(directory.rglob(f"{part}*.{end}"))]
    # The subset `main` before `socratic`; not what this script has written.
    files = [file for file in files if "socratic" not in str(file) and file != directory / "train.jsonl"]
    if not files:
        sys.exit(f"gsm8k_data: no {part}*.parquet or {part}*.jsonl below {directory}: download openai/gsm8k into it")
    return files[0]


def write(directory: Path) -> None:
    for part, name in (("train", "train"), ("test", "eval")):
        made = [
            {"input": ASK.format(row["question"].strip()), "label": row["answer"].rpartition("####")[2].strip()}
            for row in rows(find(directory, part))
        ]
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made), encoding="utf-8")
        print(f"{directory / name}.jsonl: {len(made)} prompts")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python sbatch/gsm8k_data.py DIRECTORY")
    write(Path(sys.argv[1]))
