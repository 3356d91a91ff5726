"""Part `clip`: the norm and the clip alone, on all trees and dtypes."""

from collections.abc import Callable, Iterator

from benchmarks import contenders, foreign, trees
from benchmarks.cases import Case, Options, Row
from benchmarks.held import Held
from benchmarks.oracle import Oracle
from benchmarks.timing import race


def cases(options: Options) -> Iterator[Case]:
    """A race for each tree, dtype, and norm or clip."""
    for workload in trees.workloads(options.small).values():
        for dtype in options.dtypes(workload):
            for what in ("norm", "clip"):
                labels = {"what": what, "tree": workload.name, "dtype": dtype}
                run = _case(workload, dtype, what, options)
                yield Case(labels, run, workload.title)


def _case(
    workload: trees.Workload, dtype: str, what: str, options: Options
) -> Callable[[], dict[str, Row]]:
    """How to run one race."""

    def run() -> dict[str, Row]:
        source = trees.numbers(workload.shapes, dtype)
        oracle = Oracle(source, dtype)
        held = Held(source)
        names = ["optclip"]
        if options.quick(workload):
            names += ["optax", "plain norm" if what == "norm" else "norm only"]
        if what == "norm":
            names += ["one pass"] if dtype != "f16" else []  # where one is enough
            runners = contenders.norm_race(held, oracle, names)
        else:
            names += ["own norm", "scale only", "identity"]
            names += ["transformation, recording", "transformation, silent"]
            runners = contenders.clip_race(held, oracle, names)
        others, refused = foreign.races(what, oracle)
        rows = race({**runners, **others}, options.rounds_for(workload))
        for row in rows.values():
            row["gradient_bytes"] = trees.nbytes(source)
        return {**rows, **refused}

    return run
