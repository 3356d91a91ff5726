"""Hostile input gets the documented errors or the right answer, never anything else.

pytest tests/contracts/test_fuzz.py --full      # 24,000 calls; without it 360
"""

import collections
import contextlib
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
from tests.support import fuzz, fuzz_oracle, helpers

OURS = pathlib.Path(optclip.__file__).parent
FLOAT_MAX = float(np.finfo(np.float32).max)
# Six properties share the examples asked for.
SHARE = 0.2
# From so many examples on, each function must have answered one of its own.
MANY = 1000


@pytest.fixture(autouse=True)
def whole_tracebacks():
    before = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", "off")
    yield
    jax.config.update("jax_traceback_filtering", before)


class Refused(Exception):
    """What was given is none of optclip's to use, and it says so."""


def asked(function, *args, **kwargs):
    """The answer; `Refused` where a `raise` of optclip's says what is bad.

    What Python says of a user's function that is called, or raises by itself, counts.
    """
    try:
        return function(*args, **kwargs)
    except (TypeError, ValueError) as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        raised = (last.line or "").startswith("raise ")
        ours = raised and pathlib.Path(last.filename).is_relative_to(OURS)
        theirs = last.filename.endswith("/fuzz.py") or "positional arg" in str(error)
        if not (ours or theirs) or len(str(error)) < 20:
            raise
        raise Refused from error


def try_all(holds, prop, strategy, least=0.1):
    """At least that share of the examples get an answer, so that answers are tested."""
    answered = collections.Counter()
    tried = collections.Counter()

    def attempt(given):
        name = given[0][0] if isinstance(given[0], tuple) else given[0]
        tried[name] += 1
        with contextlib.suppress(Refused):
            prop(*given)
            answered[name] += 1

    holds(attempt, strategy, SHARE)
    assert answered.total() > least * tried.total()
    if tried.total() >= MANY:
        assert not [name for name in tried if not answered[name]]


def judge(name, found, tree, expected):
    """What was clipped has the types of what was given, and no NaN of its own."""
    helpers.assert_same_types(found, tree)
    if expected is not None:
        roundings = 64 if name in fuzz_oracle.MATRICES else 0
        problem = helpers.wrong(found, expected, tree, roundings)
        assert problem is None, problem


def test_functions_take_or_refuse_anything(holds):
    compared = []

    def prop(call, tree):
        name, arguments, options = call
        found = asked(fuzz.FUNCTIONS[name], tree, *arguments, **options)
        if name == "global_norm":
            wanted = fuzz_oracle.norm(tree, options)
            compared.append(wanted is not None)
            if wanted is not None:
                room = 1e-5 * wanted + helpers.TINY
                assert abs(min(wanted, FLOAT_MAX) - min(found, FLOAT_MAX)) <= room
            return
        has_norms = name in ("clip_by", "clip_by_global_norm", "clip_by_group_norm")
        clipped = found[0] if has_norms else found
        with np.errstate(all="ignore"):
            expected = fuzz_oracle.formula(name, tree, arguments, options)
        compared.append(expected is not None)
        judge(name, clipped, tree, expected)

    try_all(holds, prop, st.tuples(fuzz.clips(fuzz.FUNCTIONS), fuzz.trees()))
    assert sum(compared) > len(compared) / 20


def stepped(tx, tree):
    """Two updates; the state keeps its types, and tells what it did."""
    state = asked(tx.init, tree)
    for _ in range(2):
        found, after = asked(tx.update, tree, state, tree)
        helpers.assert_same_types(after, state)
        state = after
    return found, state


def traced(tx, tree):
    """The same two updates, of which nothing is computed."""

    def steps():
        stepped(tx, tree)

    jax.eval_shape(steps)


def told(state):
    """What can be read of it, if it has a record."""
    try:
        numbers = asked(optclip.metrics, state)
    except Refused:
        return
    assert all(jnp.shape(x) == () for x in numbers.values())
    assert isinstance(optclip.summary(state), str)


def test_transformations_take_or_refuse_anything(holds):
    compared = []

    def prop(call, tree):
        name, arguments, options = call
        tx = asked(fuzz.FACTORIES[name], *arguments, **options)
        found, state = stepped(tx, tree)
        with np.errstate(all="ignore"):
            expected = fuzz_oracle.formula(name, tree, arguments, options)
        compared.append(expected is not None)
        judge(name, found, tree, expected)
        told(state)

    try_all(holds, prop, st.tuples(fuzz.clips(fuzz.FACTORIES), fuzz.trees()))
    assert sum(compared) > len(compared) / 20


def finite_stays(found, tree):
    """No NaN and no inf from numbers that had none.

    But for float16: the eps of optax's Adam is 0 there, and it divides zero by zero.
    """
    given = [x for x in jax.tree.leaves(tree) if hasattr(x, "dtype")]
    sizes = [np.abs(helpers.as_float64(x)) for x in given if fuzz_oracle.is_plain([x])]
    # A norm above the largest float is not finite, though all numbers are.
    if sum(np.sum(x**2) for x in sizes) > FLOAT_MAX**2 / 16:
        return
    if fuzz_oracle.is_plain(given) and not any(x.dtype == jnp.float16 for x in given):
        outs = [x for x in jax.tree.leaves(found) if hasattr(x, "dtype")]
        assert fuzz_oracle.is_plain(outs)


def test_recipes_take_or_refuse_anything(holds):
    """With an optimizer inside of those that take one."""
    others = {
        "options",
        "stacked",
        "axis",
        "inner",
        "clip",
        "groups",
        "when",
        "use_value",
    }

    def prop(call, tree, is_run):
        name, arguments = call
        if name == "olmo_skip":
            arguments = {**arguments, "use_value": False}
        if name == "aggc":
            arguments = {**arguments, "groups": lambda tree: "all"}
        tx = asked(fuzz.RECIPES[name], **arguments)
        if not is_run:
            traced(tx, tree)
            return
        found, state = stepped(tx, tree)
        assert jax.tree.structure(found) == jax.tree.structure(tree)
        # Twice the largest parameter is out of range.
        if "weight_decay" not in arguments:
            finite_stays(found, tree)
        told(state)

    # Optimizers compute with what a clip lets pass, and change the type of what is
    # NumPy's: to these, floating leaves of JAX only. Of few shapes, and one in four is
    # run: an optimizer has many operations to compile for each.
    drawn = fuzz.trees(fuzz.arrays(of_jax=True, shapes=[(), (2, 3), (0,)]))
    runs = st.sampled_from([True, False, False, False])
    try_all(holds, prop, st.tuples(fuzz.made(fuzz.RECIPES, others), drawn, runs))


def test_rules_take_or_refuse_anything(holds):
    """In every scope, by every norm and response."""
    options = {
        name: fuzz.OPTIONS[name] for name in ("over", "norm", "response", "record")
    }

    def prop(call, given, tree):
        name, arguments = call
        rule = asked(fuzz.RULES[name], **arguments)
        found, state = stepped(asked(optclip.clip_by, rule, **given), tree)
        helpers.assert_same_types(found, tree)
        told(state)

    drawn = st.tuples(
        fuzz.made(fuzz.RULES, set()), st.fixed_dictionaries(options), fuzz.trees()
    )
    try_all(holds, prop, drawn, least=0.05)


INNER = [
    optax.adam(0.1), optax.sgd(0.1, momentum=0.9), optclip.clip_by_norm(1.0),
    optax.chain(optclip.clip_by_global_norm(1.0), optax.scale(-1.0)), optax.identity(),
]  # fmt: skip
BAD_INNER = [None, 3, "adam", optax.adam, (1, 2), fuzz.Stranger()]


def test_wrappers_take_or_refuse_anything(holds):
    inner = st.one_of(*[st.sampled_from(INNER)] * 4, st.sampled_from(BAD_INNER))
    wrappers = {
        "skip": lambda inner, x: optclip.skip(inner, max_norm=x),
        "skip for a while": lambda inner, x: optclip.skip(inner, max_consecutive=x),
        "with_error_feedback": lambda inner, x: optclip.with_error_feedback(inner),
        "with_periodic_reset": lambda inner, x: optclip.with_periodic_reset(
            inner, x, warmup=2
        ),
        "after": lambda inner, x: optclip.clip_after(inner, optclip.clip_by_norm(x)),
    }

    def prop(name, inner, number, limit, tree):
        argument = (
            number if name in ("skip for a while", "with_periodic_reset") else limit
        )
        found, state = stepped(asked(wrappers[name], inner, argument), tree)
        assert jax.tree.structure(found) == jax.tree.structure(tree)
        told(state)

    drawn = st.tuples(
        st.sampled_from(sorted(wrappers)), inner, fuzz.ARGUMENTS, fuzz.limits,
        fuzz.trees(fuzz.arrays(of_jax=True)),
    )  # fmt: skip
    try_all(holds, prop, drawn, least=0.05)


STATE = optclip.clip_by_group_norm(1.0, fuzz.APART).init({"a": np.ones(2)})


def test_histories_and_states_are_read_or_refused(holds, tmp_path):
    """Pictures, summaries and suggestions of anything."""
    readers = {
        "norms": plot.norms, "rate": plot.rate, "distribution": plot.distribution,
        "heatmap": plot.heatmap, "runs": lambda h, **k: plot.runs({"run": h}, **k),
        "save": lambda h: plot.save(h, tmp_path / "x"), "summary": optclip.summary,
        "suggest": optclip.suggest, "metrics": optclip.metrics,
    }  # fmt: skip

    def prop(name, history, number, is_told):
        given = history
        if name in ("metrics", "summary") and not is_told:
            given = STATE
        if name == "suggest" and isinstance(history, dict):
            given = next(iter(history.values()), [])
        takes = {
            "rate": "window",
            "runs": "window",
            "summary": "most",
            "suggest": "rate",
        }
        options = {takes[name]: number} if name in takes and is_told else {}
        try:
            asked(readers[name], given, **options)
        finally:
            plt.close("all")

    names = st.sampled_from(sorted(readers))
    drawn = st.tuples(names, fuzz.histories(), fuzz.ARGUMENTS, st.booleans())
    try_all(holds, prop, drawn, least=0.1)
