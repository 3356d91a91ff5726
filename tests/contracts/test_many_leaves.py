"""The work of a call, and the size of its program, grow linearly with the leaves."""

import sys

import jax
import numpy as np
import optax
import pytest

import optclip
from optclip import thresholds
from tests.support import helpers

KERNEL = np.ones((4, 2, 3), np.float32)
RULE = thresholds.ema()
OPTIMIZERS = {
    "tree": optclip.clip_by_global_norm(1.0, record="leaves"),
    "leaves": optclip.clip_by_norm(RULE, record="leaves"),
    "one entry": optclip.clip_by_norm(RULE),
    "wrappers": optclip.with_history(
        optclip.skip(
            optclip.constrain(optax.sgd(1.0), optclip.clip_by_norm(1.0)), max_norm=RULE
        )
    ),
}
CALLS = {
    "init": lambda tx, params, state: tx.init(params),
    "update": lambda tx, *args: jax.make_jaxpr(tx.update)(*args, args[0]),
    "metrics": lambda tx, params, state: optclip.metrics(state),
    "summary": lambda tx, params, state: str(optclip.summary(state)),
    "carry_over": lambda tx, *args: optclip.carry_over(tx, *args, tx, args[0]),
    "find_heads": lambda tx, params, state: optclip.find_heads(
        params, query="query", key="key"
    ),
}


def calls_of(function, *args):
    """Return how many functions a call calls, and its result."""
    events = []
    sys.setprofile(lambda frame, event, arg: events.append(event))
    try:
        result = function(*args)
    finally:
        sys.setprofile(None)
    return sum(event.endswith("call") for event in events), result


@pytest.mark.parametrize("tx", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_work_and_program_grow_linearly_with_leaves(tx):
    work, equations = [], []
    # The first call fills caches.
    for number in (2, 10, 40):
        layers = {f"{i}": {"query": KERNEL, "key": KERNEL} for i in range(number)}
        state = tx.init(layers)
        counts = {name: calls_of(f, tx, layers, state) for name, f in CALLS.items()}
        work.append({name: count for name, (count, _) in counts.items()})
        program = counts["update"][1].jaxpr
        equations.append(sum(1 for _ in helpers.equations(program)))
    assert equations[2] < 4.1 * equations[1]
    for name in CALLS:
        assert work[2][name] < 4.4 * work[1][name], name
