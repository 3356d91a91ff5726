"""Read an offline run of W&B, for which W&B itself has no public reader.

After a header of 7 bytes, the file is a log in LevelDB's format. Blocks of 32 KiB
contain pieces with a checksum (4 bytes), a length (2) and a type (1 byte: 1 whole, 2
first, 3 middle, 4 last piece of a record).
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
TIMEOUT = 600.0  # Seconds; a busy machine needs far more than an idle one.


def history(path: str | Path) -> list[dict[str, Any]]:
    """Return one dict per step, after the last record of the run has been written."""
    end, records = time.monotonic() + TIMEOUT, []
    # A background process may still write the file after `finish` has returned.
    while not any(record.HasField("exit") for record in records):
        assert time.monotonic() < end, f"{path} was not finished in {TIMEOUT} s"
        time.sleep(0.1)
        records = [*_records(Path(path).read_bytes())]
    steps = [record.history.item for record in records if record.HasField("history")]
    return [
        {".".join(x.nested_key) or x.key: json.loads(x.value_json) for x in step}
        for step in steps
    ]


def _records(data: bytes) -> Iterator[Record]:
    position, record = START, b""
    while position + HEAD <= len(data):
        left = BLOCK - position % BLOCK
        _, length, kind = struct.unpack_from("<IHB", data, position)
        if left < HEAD:
            position += left
            continue
        position += HEAD + length
        if position > len(data):
            return
        record += data[position - length : position]
        if kind in (WHOLE, LAST):
            yield Record.FromString(record)
            record = b""
