"""Benchmark `gpu`: equality with the CPU, times and kernels on one GPU.

If a part raises, the error is recorded and the next part runs. With `--small`, all parts
also run on a CPU.
"""

import functools
import gc
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from benchmarks import results
from benchmarks.gpu import counts, equality, models
from benchmarks.timing import Row

LIMIT = 570.0  # seconds
OUT_OF_TIME = "skipped: out of time"

# Ordered by importance, since a run may reach its time limit.
PARTS: dict[str, Callable[[bool], Iterator[Row]]] = {
    "equality with the CPU": equality.rows,
    "clipping alone": models.clipping,
    "training step, bfloat16": functools.partial(models.training, dtype="bfloat16"),
    "counts": counts.rows,
    "AdamW step": models.stepping,
    "training step, float32": functools.partial(models.training, dtype="float32"),
    "other clipping, AdamW step": models.others,
    "per-example norms": models.per_example,
}


def rows(
    tiny: bool, limit: float = LIMIT, parts: Sequence[str] = tuple(PARTS)
) -> Iterator[Row]:
    """Yield the rows of each part, and a note for each part that ran out of time.

    The parts run in a thread, because a compilation cannot be interrupted. At the
    limit, the generator returns while the thread continues.
    """
    if unknown := [part for part in parts if part not in PARTS]:
        raise ValueError(
            f"unknown part {unknown[0]!r}; choose from {', '.join(map(repr, PARTS))}"
        )
    deadline = time.monotonic() + limit
    measured: queue.SimpleQueue[tuple[str, Row | None]] = queue.SimpleQueue()
    arguments = (parts, tiny, deadline, measured.put)
    threading.Thread(target=_measure, args=arguments, daemon=True).start()
    waiting = list(parts)
    while waiting:
        try:
            part, row = measured.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            yield from ({"part": part, "note": OUT_OF_TIME} for part in waiting)
            return
        if row is None:
            waiting.remove(part)
        else:
            yield {"part": part, **row}


def _measure(
    parts: Sequence[str],
    tiny: bool,
    deadline: float,
    put: Callable[[tuple[str, Row | None]], None],
) -> None:
    """Put each row with its part, and None after the last row of a part."""
    for part in parts:
        if time.monotonic() >= deadline:
            return
        start = time.perf_counter()
        try:
            for row in PARTS[part](tiny):
                put((part, row))
        except Exception as error:
            put((part, {"note": f"{type(error).__name__}: {error}"[:1000]}))
        put((part, {"note": f"{time.perf_counter() - start:.0f} s for this part"}))
        put((part, None))
        gc.collect()  # Frees the memory of the part for the next one.


def table(rows: Sequence[Row]) -> str:
    """Format a table per part, followed by its notes."""
    texts = []
    for part in dict.fromkeys(row["part"] for row in rows):
        part_rows = [
            {k: v for k, v in r.items() if k != "part"}
            for r in rows
            if r["part"] == part
        ]
        measured = [row for row in part_rows if row.keys() != {"note"}]
        texts += [f"### {part}", *([results.table(measured)] if measured else [])]
        texts += [row["note"] for row in part_rows if row.keys() == {"note"}]
    return "\n\n".join(texts)
