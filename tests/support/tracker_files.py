"""Read what trackers keep of a run: trackio's database, and the files of Weights & Biases.

An offline run of the latter is a log in LevelDB's format with records of W&B's own protocol.
"""

from __future__ import annotations

import json
import sqlite3
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

_BLOCK, _HEADER, _IDENT = 32768, 7, 7
_FULL, _FIRST, _LAST = 1, 2, 4


def records(path: Path) -> Iterator[Any]:
    """Yield every record of a file."""
    from wandb.proto.wandb_internal_pb2 import Record

    for data in _joined(path.read_bytes()):
        record = Record()
        record.ParseFromString(data)
        yield record


def _joined(data: bytes) -> Iterator[bytes]:
    place, parts = _IDENT, b""
    while place + _HEADER <= len(data):
        if (left := _BLOCK - place % _BLOCK) < _HEADER:
            place += left
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + _HEADER])
        part = data[place + _HEADER : place + _HEADER + length]
        place += _HEADER + length
        parts = part if kind in (_FULL, _FIRST) else parts + part
        if kind in (_FULL, _LAST):
            yield parts


def history(found: Iterable[Any]) -> list[dict[str, Any]]:
    """Return the rows of metrics among records."""
    rows = []
    for record in found:
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    return rows


def trackio_rows(database: Path) -> list[tuple[str, str, int, dict[str, Any]]]:
    """Return id and name of the run, step and metrics of each row of one project, oldest first."""
    with sqlite3.connect(database) as store:
        rows = store.execute("select run_id, run_name, step, metrics from metrics order by id").fetchall()
    return [(run, name, step, json.loads(metrics)) for run, name, step, metrics in rows]


def wandb_starts(place: Path, run_id: str) -> list[list[Any]]:
    """Return the records of each start of an offline run, oldest first."""
    starts = sorted(place.glob(f"offline-run-*-{run_id}"))
    return [list(records(start / f"run-{run_id}.wandb")) for start in starts]
