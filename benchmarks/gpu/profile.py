"""Part `profile`: count and time the GPU kernels and copies of one call.

The profile includes kernels in command buffers and branches, and copies to the host,
for which a program waits. Times are measured on the GPU and exclude launches. A device
without GPU events yields a note.
"""

import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from benchmarks.gpu import counts, racing
from benchmarks.timing import Row


def rows(tiny: bool) -> Iterator[Row]:
    source = jax.device_put(racing.numbers(tiny, "float32"))
    for name, tx in counts.clips().items():
        state, update = tx.init(source), jax.jit(tx.update)
        # Called twice before profiling, since XLA records the graph that it replays.
        for _ in range(2):
            jax.block_until_ready(update(source, state, source))
        events = profiled(lambda f=update, s=state: f(source, s, source))
        if not events:
            yield {"note": "the profile has no events of a GPU"}
            return
        kinds = Counter(kind for kind, _ in events)
        copies = {kind: n for kind, n in kinds.items() if kind.startswith("Mem")}
        yield {
            "contender": name,
            "kernels": kinds.total() - sum(copies.values()),
            "ms": sum(nanoseconds for _, nanoseconds in events) / 1e6,
            "copies": ", ".join(f"{n} {kind}" for kind, n in copies.items()) or "none",
        }


def profiled(call: Any) -> list[tuple[str, float]]:
    """Return the name and the nanoseconds of each event on the streams of all GPUs."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(call())
        (path,) = Path(folder).rglob("*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(path))
        return [
            (event.name, event.duration_ns)
            for plane in data.planes
            if plane.name.startswith("/device:GPU")
            for line in plane.lines
            if line.name.startswith("Stream")
            for event in line.events
        ]
