"""The page: what was done, a table for each model, and what the data says."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.spikes import measures, picture, plan, record
from benchmarks.spikes.models import MODELS
from benchmarks.spikes.record import Row, Spread, spread

# Written by hand, from the run of 2026-11-22.
ADVICE = """The batch with a huge gradient is what a clip is for. No clip is above the level before
it for 65 of the 70 steps that follow; the clips by norm and the rules that skip for
about 15 on the recurrent network and 26 to 40 on the transformer; but `clippy`,
`stable_adamw` and `spam` for 49 to 69, which limit the step but let Adam's second
moment see most of that gradient. `uclip`, `sclip` and `aggc` with their defaults end
within 0.02 of no clip: the first two limit single elements to 1, more than the norm of
a whole ordinary gradient here, and the last takes no more than a tenth off any norm.

Whatever holds norms near their usual size does well: `adagc`, `agc`, `zclip`,
`autoclip`, `olmo_ratio`, `auto_s`, `stable_spam`, or a plain clip by global norm at up
to one and a half times the median norm. Five seeds hardly tell these apart on the
recurrent network, where `agc` has the lowest median; on the transformer no seed of
`adagc` is above 2.612 and none of any other method below 2.616. So: without a number at
hand, `adagc`; with a look at the norms, a clip by global norm, which at the best of five
thresholds is 0.01 behind it on the one and 0.04 on the other. A threshold that only
outliers reach is not enough on the transformer: rules that skip, `mean_std_clip` and a
global norm of 3 take care of the huge gradient as well, but end 0.1 behind `adagc`.

Only `clippy` limits the burst itself: it loses 9 and 19 of the 80 steps after it, the
clips of gradients 56 to 79. With a clip by norm before Adam it might have the best of
both; that was not tried. Corrupted batches have about three times the usual norm and
cost any method 28 to 67 of the 150 steps after them, no clip too. `acclip` wants a
learning rate of its own; one factor was tried, roughly."""
WHERE = "images/spikes.png"
PLUS = " (a plus: with changes that were not committed)"


def write(data: Mapping[str, Any], path: Path) -> None:
    """The page and its picture beside it."""
    image = path.parent / WHERE
    image.parent.mkdir(parents=True, exist_ok=True)
    picture.draw(data).savefig(image, dpi=130)
    path.write_text("\n".join(text(data)))


def text(data: Mapping[str, Any]) -> Iterator[str]:
    """The paragraphs."""
    yield "# Which clip, when training spikes\n"
    yield done(data)
    yield "## What the data says\n"
    yield from findings(data)
    if not data["small"]:
        yield f"{ADVICE}\n"
    yield f"![held-out loss of each method, every seed a dot]({WHERE})\n"
    for model in record.models(data):
        yield f"## {data['models'][model].capitalize()}\n"
        yield table(data, model)
        yield tuned(data, model)
    yield provenance(data)


def done(data: Mapping[str, Any]) -> str:
    """What was run."""
    rates = ", ".join(
        f"{rate:g} for the {model}" for model, rate in data["learning_rates"].items()
    )
    window = MODELS[0].window
    return f"""Made by `python -m benchmarks.spikes`. Two small models of characters learn the text of
CPython's help: the network of the [main job](../examples/train_char_rnn.py), with
fewer units, and a transformer; {data["steps"]} steps with {data["seeds"]} seeds, on windows of {window} characters, 8 at a
time. Each run is computed in bfloat16 with parameters kept in float32, and is hit on
purpose, counted from step 0:

- **corrupted** batches, of random characters, at steps {steps_of(data, "corrupted")};
- a **burst** of the learning rate, times {plan.BURST_FACTOR:g} for {plan.BURST_STEPS} steps, from step {steps_of(data, "burst")};
- a **mislabelled** batch, its targets shuffled and its loss times {plan.LOSS_FACTOR:g}, at step
  {steps_of(data, "mislabelled")}: the norm of that gradient is tens of times that of any other.

The optimizer is Adam without weight decay, warmed up over {plan.WARMUP:.0%} of the steps and then on a
cosine, with the same peak learning rate for all methods: {rates}. Each
method sees the same weights and batches. Recipes have their defaults, with two
exceptions: `megatron_skip` is given a number, for by default it skips only what is not
finite; and `acclip` is also run at a learning rate of its own, for its steps have the
size of the gradients, not Adam's. Of five thresholds
of the global norm the best is ranked; it is chosen by the losses shown here, so it is
the only method that was tuned to these spikes. The burst happens behind a clip of
gradients, which cannot see it; `clippy` alone can, as it clips the steps.

Nothing here lasts long enough for the resets of `spam` (every 500 steps) and
`stable_spam` (1,000), and none is large enough to say how a method fares at scale.
"""


def steps_of(data: Mapping[str, Any], kind: str) -> str:
    """When a kind of spike came."""
    found = [each.split()[-1] for each in data["events"] if each.startswith(kind)]
    return ", ".join(found)


def findings(data: Mapping[str, Any]) -> Iterator[str]:
    """Plain statements of rank."""
    ranks = record.mean_ranks(data)
    best = ", ".join(f"{record.title(x)} ({ranks[x]:g})" for x in list(ranks)[:5])
    yield f"Mean place over both models of {len(ranks)} methods, the best five: {best}.\n"
    for model in record.models(data):
        rows = record.ranked(data, model)
        places = [row["method"] for row in rows]
        better = rows[: places.index("no clip")]
        clear = [x for x in better if not overlap(x, rows[places.index("no clip")])]
        lost = [row["method"] for row in rows if any(row["diverged"])]
        yield (
            f"On the {model} {len(better)} of {len(rows) - 1} have a lower median loss"
            f" than no clip, {len(clear)} of them with every seed below every one of no"
            f" clip's. With a seed that diverged: {', '.join(lost) or 'none'}.\n"
        )


def overlap(a: Row, b: Row) -> bool:
    """Whether the ranges of two methods' losses touch."""
    first, second = record.final(a), record.final(b)
    return first.low <= second.high and second.low <= first.high


def table(data: Mapping[str, Any], model: str) -> str:
    """All methods on one model, the lowest loss first."""
    lines = [
        "| method | final loss | worst loss | steps lost | after corrupted / burst /"
        " mislabelled | clipped or skipped | diverged |",
        "|---|---|---|---|---|---|---|",
        *(line(row) for row in record.ranked(data, model)),
    ]
    calm = record.reference(data, model)
    if calm:
        lines.append(line({**calm, "method": "*no clip, without spikes*"}))
    return "\n".join(lines) + "\n"


def line(row: Row) -> str:
    """One method: medians, and the range over the seeds."""
    kinds = (row["lost_to"].get(kind) for kind in plan.KINDS)
    lost_to = " / ".join(f"{spread(each).median:.0f}" if each else "" for each in kinds)
    cells = (
        record.label(row),
        ranged(record.final(row), 3),
        ranged(spread(row["worst"]), 2),
        ranged(spread(row["lost"]), 0) if row["spikes"] else "",
        lost_to if row["spikes"] else "",
        f"{spread(row['rate']).median:.1%}" if row["rate"] else "",
        f"{sum(row['diverged'])} of {len(row['diverged'])}",
    )
    return f"| {' | '.join(cells)} |"


def ranged(found: Spread, digits: int) -> str:
    """A median and the range."""
    middle, low, high = (f"{x:.{digits}f}" for x in found)
    return f"{middle} ({low} to {high})".replace("inf", "NaN")


def tuned(data: Mapping[str, Any], model: str) -> str:
    """The thresholds of the global norm that were tried."""
    rows = [row for row in record.of_model(data, model) if row["family"] == "tuned"]
    tried = ", ".join(
        f"{row['method'].split()[-1]}: {record.final(row).median:.3f}" for row in rows
    )
    calm = record.reference(data, model)
    norm = (
        f"; the median norm of a gradient without spikes is {calm['norm']:.2f}"
        if calm
        else ""
    )
    return f"Median final loss by threshold of the global norm: {tried}{norm}.\n"


def provenance(data: Mapping[str, Any]) -> str:
    """How to read the tables, where they were measured, and how to do it again."""
    machine = data["machine"]
    versions = machine["versions"]
    known = ", ".join(
        f"{name} {versions[name]}" for name in ("optclip", "jax", "optax")
    )
    return f"""## How to read and re-measure

A number is the median of {data["seeds"]} seeds, with the range over them. *Final loss* is of the
held-out text after the last step, in nats per character, computed in bfloat16 too.
*Worst loss* is the largest of a training batch after step {measures.SETTLED}. It and *steps lost* leave
out the steps whose own batch is a spike, and see what it did from the next step on.
*Steps lost* is the number of steps from the first spike on whose running mean of the
loss (decay {measures.SMOOTHING:g}) is above what it was just before; then for each kind from each spike
to the next one, above the level before that spike, summed. The mean of a few batches
wavers, so that some steps are lost without spikes too. *Clipped or skipped* is the share
of steps skipped, or else of steps in which the method clipped anything at all, be it one
element; of groups that of the one clipped most. *Diverged* is a final loss of NaN or
above the {data["unigram_loss"]:.3f} nats of letter frequencies alone.

`python3 run.py train` once sets up `.venv`, then

    .venv/bin/python -m benchmarks.spikes            # all of this; {data["seconds"] / 60:.0f} minutes here, see the load below
    .venv/bin/python -m benchmarks.spikes --saved    # this page again from the numbers
    .venv/bin/python -m benchmarks.spikes --small    # a smoke test

{machine["cpu"]}, {machine["cores"]} cores; Python {machine["python"]}, {known}; {data["date"]}, load average
{data["load"]} at the start; {data["seconds"]:.0f} seconds in all; commit {data["commit"]}{PLUS if (data["commit"] or "").endswith("+") else ""}.
All numbers of all seeds are in `benchmarks/results/spikes.json`.
"""
