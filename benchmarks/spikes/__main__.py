"""Train with injected spikes by every method, save, write the page and the picture.

It took 11 minutes on two cores with little other work; `--small` is a smoke test.
"""

import argparse
import itertools
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import machine
from benchmarks.spikes import measures, methods, page, record
from benchmarks.spikes.methods import Method
from benchmarks.spikes.models import MODELS, Model
from benchmarks.spikes.plan import Plan, spiked
from benchmarks.spikes.training import train
from examples.train_char_rnn import Corpus, read_corpus

ROOT = Path(__file__).parents[2]
STEPS, SEEDS = 400, 5
# A smoke test's.
SMALL_STEPS, SMALL_SEEDS = 24, 2
SMALL_METHODS = ("no clip", "global norm 0.3", "olmo_skip")


class Job(NamedTuple):
    """A method on a model, with or without spikes."""

    model: Model
    method: Method
    plan: Plan


def jobs(chosen: Sequence[Method], plan: Plan) -> list[Job]:
    """All of them, and each model without a clip and without spikes."""
    no_clip = next(each for each in chosen if each.name == "no clip")
    calm = [Job(model, no_clip, Plan(plan.steps)) for model in MODELS]
    return calm + list(
        itertools.starmap(Job, itertools.product(MODELS, chosen, [plan]))
    )


def rows(
    todo: Sequence[Job], corpus: Corpus, seeds: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """Train all, two at a time: while one is compiled, which takes one core."""

    def done(job: Job) -> dict[str, Any]:
        start = time.monotonic()
        run = train(job.model, job.method, job.plan, corpus, seeds)
        return {
            "model": job.model.name,
            "method": job.method.name,
            "family": job.method.family,
            "spikes": bool(job.plan.events()),
            **measures.row(run, job.plan, corpus.unigram_loss),
            "seconds": time.monotonic() - start,
        }

    with ThreadPoolExecutor(2) as pool:
        for row in pool.map(done, todo):
            loss = record.final(row).median
            told = "" if row["spikes"] else " without spikes"
            print(
                f"{row['model']}, {row['method']}{told}: {loss:.3f}"
                f" in {row['seconds']:.0f} s",
                flush=True,
            )
            yield row


def head(plan: Plan, seeds: int, corpus: Corpus, *, small: bool) -> dict[str, Any]:
    """What the rows were measured with."""
    return {
        **machine.moment(),
        "machine": machine.describe(),
        "commit": machine.commit(),
        "small": small,
        "seconds": 0.0,
        "steps": plan.steps,
        "seeds": seeds,
        "events": [f"{kind} at {step}" for step, kind in plan.events()],
        "unigram_loss": corpus.unigram_loss,
        "models": {model.name: model.title for model in MODELS},
        "learning_rates": {model.name: model.learning_rate for model in MODELS},
        "rows": [],
    }


def measure(out: Path, *, small: bool) -> dict[str, Any]:
    """Run everything; what is done is saved at once."""
    corpus, start = read_corpus(), time.monotonic()
    plan = spiked(SMALL_STEPS if small else STEPS)
    seeds = SMALL_SEEDS if small else SEEDS
    chosen = methods.all_methods()
    if small:
        chosen = [each for each in chosen if each.name in SMALL_METHODS]
    data = head(plan, seeds, corpus, small=small)
    for row in rows(jobs(chosen, plan), corpus, range(seeds)):
        data["rows"].append(row)
        data["seconds"] = time.monotonic() - start
        record.save(out, data)
    return data


def main(given: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser("python -m benchmarks.spikes", description=__doc__)
    add = parser.add_argument
    add("--small", action="store_true", help="a smoke test of a minute")
    add("--saved", action="store_true", help="measure nothing, write the page again")
    add("--out", type=Path, help="the JSON file; benchmarks/results/spikes.json")
    add("--page", type=Path, help="the page; docs/spikes.md, none if small")
    arguments = parser.parse_args(given)
    name = "spikes_small.json" if arguments.small else "spikes.json"
    out = arguments.out or ROOT / "benchmarks" / "results" / name
    if not arguments.saved:
        measure(out, small=arguments.small)
    where = arguments.page or (None if arguments.small else ROOT / "docs" / "spikes.md")
    if where:
        page.write(record.read(out), where)


if __name__ == "__main__":
    main()
