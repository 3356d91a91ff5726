"""Hostile input raises a documented error or returns the correct result.

pytest tests/contracts/test_fuzz.py --full    # 20,000 calls; without it 150
"""

import collections
import contextlib
import functools
import pathlib
import traceback

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
import pytest
from hypothesis import strategies as st

import optclip
from optclip import plot
from tests.support import fuzz_oracle, helpers, oracles, strategies
from tests.support.fuzz_oracle import LARGEST, LEAST

OURS = pathlib.Path(optclip.__file__).parent
SHARE = strategies.fraction(full=1 / 3, quick=1 / 6)
# From so many examples on each callable must have answered at least one.
MANY = 1000


@pytest.fixture(autouse=True)
def _whole_tracebacks():
    before = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", "off")
    yield
    jax.config.update("jax_traceback_filtering", before)


class Rejected(Exception):
    """Signal that optclip raised a documented error."""


def ask(function, *args, **kwargs):
    """Call; raise `Rejected` for an error of optclip, or of the user's function."""
    try:
        return function(*args, **kwargs)
    except (TypeError, ValueError) as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        is_raised = (last.line or "").startswith("raise ")
        ours = is_raised and pathlib.Path(last.filename).is_relative_to(OURS)
        users = last.filename.endswith("/strategies.py") or "positional" in str(error)
        if not (ours or users) or len(str(error)) < 20:
            raise
        raise Rejected from error


def try_all(holds, prop, strategy, least=0.1):
    """Try calls; this fraction of them must be answered, so that answers are tested."""
    answered, tried = collections.Counter(), collections.Counter()

    def attempt(drawn):
        name = drawn[0][0] if isinstance(drawn[0], tuple) else drawn[0]
        tried[name] += 1
        with contextlib.suppress(Rejected):
            prop(*drawn)
            answered[name] += 1

    holds(attempt, strategy, SHARE)
    assert answered.total() > least * tried.total()
    if tried.total() >= MANY:
        assert set(answered) == set(tried)


def step_twice(tx, tree):
    """Two updates; the state keeps its types."""
    state = ask(tx.init, tree)
    for _ in range(2):
        clipped, after = ask(tx.update, tree, state, tree)
        helpers.assert_same_types(after, state)
        state = after
    return clipped, state


def read(state):
    """Check that metrics are scalars and a summary is text, if there is a record."""
    with contextlib.suppress(Rejected):
        metrics = ask(optclip.metrics, state)
        assert all(jnp.shape(x) == () for x in metrics.values())
        assert isinstance(optclip.summary(state), str)


def test_clips_hostile_call_follows_formula_or_is_rejected(holds):
    compared = []

    def prop(call, tree):
        name, arguments, options = call
        function = strategies.CLIPS[name]
        if name == "functional.global_norm":
            norm = ask(function, tree, **options)
            if not options.keys() - {"ord"} and fuzz_oracle.is_finite(tree):
                leaves = jax.tree.leaves(helpers.as_xla_sees(tree))
                expected = oracles.tree_norm(leaves, options.get("ord") or 2.0)
                error = abs(min(expected, LARGEST) - min(norm, LARGEST))
                assert error <= 1e-5 * expected + LEAST
            return
        if name.startswith("functional."):
            clipped = ask(function, tree, *arguments, **options)
            # Functions of one or several shared norms return these too.
            with_norms = ("clip_by", "clip_by_global_norm", "clip_by_group_norm")
            if name.removeprefix("functional.") in with_norms:
                clipped, _ = clipped
        else:
            clipped, state = step_twice(ask(function, *arguments, **options), tree)
            read(state)
        helpers.assert_same_types(clipped, tree)
        with np.errstate(all="ignore"):
            expected = fuzz_oracle.formula(name, tree, arguments, options)
        compared.append(expected is not None)
        if expected is not None:
            problem = helpers.wrong(clipped, expected, tree)
            assert problem is None, problem

    try_all(holds, prop, st.tuples(strategies.clips(), strategies.ANYTHING))
    assert sum(compared) > len(compared) / 20


def make_recipe(name, arguments):
    if name == "olmo_skip":
        arguments = {**arguments, "use_value": False}
    if name == "aggc":
        arguments = {**arguments, "groups": lambda tree: "all"}
    return strategies.RECIPES[name](**arguments)


def make_rule(name, arguments, options):
    return optclip.clip_by(strategies.RULES[name](**arguments), **options)


def make_after(inner, limit):
    return optclip.clip_after(inner, optclip.clip_by_norm(limit))


INNER = strategies.mostly(
    [optax.adam(0.1), optclip.clip_by_norm(1.0), optax.identity()],
    [None, 3, "adam", optax.adam, strategies.Stranger()],
)
NUMBERS, LIMITS = strategies.NUMBERS, strategies.LIMITS
RULE_OPTIONS = st.fixed_dictionaries(
    {k: strategies.OPTIONS[k] for k in ("over", "norm", "response", "record")}
)
BUILDERS = {
    "skip": (optclip.skip, INNER, LIMITS),
    "reset": (optclip.with_periodic_reset, INNER, NUMBERS),
    "after": (make_after, INNER, LIMITS),
    "feedback": (optclip.with_error_feedback, INNER),
}


def built(draw_name):
    """Draw a factory of a transformation with memory, and its arguments."""
    builder, *arguments = BUILDERS[draw_name]
    return st.tuples(st.just(draw_name), st.just(builder), st.tuples(*arguments))


REMEMBERING = st.one_of(
    strategies.made(strategies.RECIPES).map(lambda x: (x[0], make_recipe, x)),
    st.tuples(strategies.made(strategies.RULES), RULE_OPTIONS).map(
        lambda x: (x[0][0], make_rule, (*x[0], x[1]))
    ),
    st.sampled_from(sorted(BUILDERS)).flatmap(built),
)


def assert_finite_stays(out, tree):
    """Finite input gives no NaN or inf if the squares of its norm are in range.

    Except in float16, where the eps of optax's Adam is 0.
    """
    given = jax.tree.leaves(tree)
    if not fuzz_oracle.is_finite(given) or any(x.dtype == jnp.float16 for x in given):
        return
    if sum(np.sum(helpers.as_float64(x) ** 2) for x in given) < LARGEST**2 / 16:
        assert fuzz_oracle.is_finite(out)


def test_memories_hostile_call_is_answered_or_rejected(holds):
    """Recipes, rules and wrappers; one call in four computes, the others are traced."""

    def prop(call, tree, is_run):
        _, builder, arguments = call
        tx = ask(builder, *arguments)
        steps = functools.partial(step_twice, tx, tree)
        out, state = steps() if is_run else jax.eval_shape(steps)
        assert jax.tree.structure(out) == jax.tree.structure(tree)
        if builder is make_rule:
            helpers.assert_same_types(out, tree)
        if is_run:
            read(state)
        # Twice the largest parameter is out of range.
        if is_run and builder is make_recipe and "weight_decay" not in arguments[1]:
            assert_finite_stays(out, tree)

    is_run = st.sampled_from([True, False, False, False])
    try_all(holds, prop, st.tuples(REMEMBERING, strategies.FLOATING, is_run))


STATE = optclip.clip_by_group_norm(1.0, strategies.APART).init({"a": np.ones(2)})


def test_readers_hostile_history_is_read_or_rejected(holds, tmp_path):
    readers = {
        "norms": plot.norms,
        "rate": plot.rate,
        "distribution": plot.distribution,
        "heatmap": plot.heatmap,
        "runs": lambda history, **options: plot.runs({"run": history}, **options),
        "save": lambda history: plot.save(history, tmp_path / "x"),
        "summary": optclip.summary,
        "suggest": optclip.suggest,
        "metrics": optclip.metrics,
    }
    options = {"rate": "window", "runs": "window", "summary": "most", "suggest": "rate"}

    def prop(name, history, number, has_option):
        if name in ("metrics", "summary") and not has_option:
            history = STATE
        if name == "suggest" and isinstance(history, dict):
            history = next(iter(history.values()), [])
        option = {options[name]: number} if name in options and has_option else {}
        try:
            ask(readers[name], history, **option)
        finally:
            plt.close("all")

    histories = strategies.metrics_histories()
    names = st.sampled_from(sorted(readers))
    drawn = st.tuples(names, histories, strategies.NUMBERS, st.booleans())
    try_all(holds, prop, drawn)
