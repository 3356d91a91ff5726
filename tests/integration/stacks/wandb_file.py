"""A run that W&B wrote offline: its own reader is its server, so this is a small one.

The file is a log of records as LevelDB keeps them, behind seven bytes of its own: blocks
of 32 KiB, in each of them pieces with a checksum (4 bytes), a length (2) and a type (1:
whole, or 2 first, 3 middle, 4 last piece).
"""

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto.wandb_internal_pb2 import Record

START, BLOCK, HEAD = 7, 32_768, 7
WHOLE, LAST = 1, 4
PATIENCE = 30.0


def history(path: str | Path) -> list[dict[str, Any]]:
    """What was logged, one dict a step, once the run's last record is in the file."""
    end = time.monotonic() + PATIENCE
    records = _records(Path(path))
    # The process that writes the file may still do so when `finish` has returned.
    while not any(record.HasField("exit") for record in records):
        assert time.monotonic() < end, f"{path} was not finished in {PATIENCE} s"
        time.sleep(0.1)
        records = _records(Path(path))
    steps = [record.history.item for record in records if record.HasField("history")]
    return [{_key(item): json.loads(item.value_json) for item in s} for s in steps]


def _key(item: Any) -> str:
    return ".".join(item.nested_key) or item.key


def _records(path: Path) -> list[Record]:
    return [Record.FromString(data) for data in _contents(path.read_bytes())]


def _contents(data: bytes) -> Iterator[bytes]:
    position, pieces = START, b""
    while position + HEAD <= len(data):
        left = BLOCK - position % BLOCK
        if left < HEAD:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        position += HEAD
        if position + length > len(data):
            return
        pieces += data[position : position + length]
        position += length
        if kind in (WHOLE, LAST):
            yield pieces
            pieces = b""
