"""Measure, save, and write the page: `python -m benchmarks [PART ...]`.

Parts are run in turn and merged, case by case, into one JSON file, so that they can be
run one by one and cases measured again; then the page and the plots are made from it.
`python -m benchmarks weight` is apart: what a clip weighs before it runs.
"""

import argparse
import os
import sys
from pathlib import Path

# Before JAX is imported: the libraries share the memory of a GPU, and are quiet.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import jax

from benchmarks import report, weight
from benchmarks.cases import PARTS, Options, cases_of
from benchmarks.results import Results

HERE = Path(__file__).parent


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser("python -m benchmarks", description=__doc__)
    add = parser.add_argument
    add(
        "parts",
        nargs="*",
        choices=[*PARTS, []],  # argparse of Python 3.11 checks the empty list too
        metavar="PART",
        help=f"of {', '.join(PARTS)}; all if none",
    )
    add("--rounds", type=int, default=15, help="timed calls of each contender")
    add("--small", action="store_true", help="tiny sizes: a smoke test of a minute")
    add(
        "--long",
        action="store_true",
        help="also optax on 4,000 leaves; left out, its rows there are lost",
    )
    add("--only", default="", metavar="WORDS", help="cases with all of these words")
    add("--out", type=Path, help="the JSON file; benchmarks/results/<cpu|gpu>.json")
    add("--page", type=Path, help="the page; docs/performance.md, none if small")
    add("--list", action="store_true", help="name the cases and stop")
    return parser.parse_args()


def main() -> None:
    """Run the parts."""
    if sys.argv[1:] == ["weight"]:
        weight.main()
        return
    arguments = parsed()
    jax.config.update("jax_enable_compilation_cache", False)
    backend = jax.default_backend()
    options = Options(
        arguments.rounds, arguments.small, arguments.long, gpu=backend == "gpu"
    )
    kept = "small" if options.small else backend
    out = arguments.out or HERE / "results" / f"{kept}.json"
    words = set(arguments.only.split())
    results = Results(out)
    chosen = [
        (part, case)
        for part in arguments.parts or PARTS
        for case in cases_of(part, options)
        if words <= set(case.name.split())
    ]
    if not chosen:
        sys.exit(f"No case has all of the words {arguments.only!r}: see --list.")
    for part, case in chosen:
        print(f"{part}: {case.name}", flush=True)
        if not arguments.list:
            results.add(part, case, case.run(), options)
    page = arguments.page or (None if options.small else report.PAGE)
    if page and not arguments.list:
        report.write(_saved(out), page)


def _saved(out: Path) -> list[Path]:
    """The file just written, and those of other kinds of machine beside it."""
    kinds = (out.with_name(f"{kind}.json") for kind in ("cpu", "gpu"))
    others = [path for path in kinds if path != out and path.exists()]
    return [out, *others] if out.stem in ("cpu", "gpu") else [out]


if __name__ == "__main__":
    main()
