"""Each norm teaches a rule by itself: NaN, inf and zero gradients teach it nothing."""

import dataclasses
import itertools
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optclip
from optclip import thresholds as T
from tests.support import covering, helpers
from tests.support.running_rules import DIRECTION, RULES, WITH_ZEROS, seen
from tests.support.steps import over_steps

# The steps in which a norm teaches nothing, the first three of them in any order.
BROKEN = [0, 1, 2, 5, 9, 10]
ORDERS = [*itertools.permutations([np.nan, np.inf, 0.0])]
SCOPES = {
    # One vector for all norms of a rule, or an array per leaf for slices and elements.
    "leaf": "leaf",
    "group of one leaf": optclip.groups({"a": "x", "b": "y"}),
    "slice": optclip.axes((1, 2)),
    "unit": optclip.units(stacked=lambda path: True),
    "layer": optclip.layers("", each_leaf=True),
    "matrix": optclip.matrices(),
    "singular value": optclip.singular_values(),
    "element": "element",
    "elements of a leaf": "element",
}
# Rules with a mean, a window, a mean and a variance, and zeros.
BY_SLICE = ("ema", "quantile", "zscore", "previous_norm")
OF_ELEMENTS = ("ema_of_max", "moment", "second_moment")
CASES = [
    *(
        (rule, "leaf")
        for rule in RULES
        if rule not in OF_ELEMENTS and (covering.full or "," not in rule)
    ),
    *((rule, "slice") for rule in RULES if rule in BY_SLICE or covering.full),
    *((rule, "element") for rule in ("ema", "moment", "second_moment")),
    ("ema_of_max", "elements of a leaf"),
    *(
        ("quantile", x)
        for x in ("group of one leaf", "unit", "layer", "singular value")
    ),
    *(("initial_norm", x) for x in ("leaf", "matrix", "element")),
    *(("user's window", x) for x in ("leaf", "slice", "layer", "element")),
]


@dataclasses.dataclass(frozen=True)
class LastTwo:
    """A user's rule, whose memory has the last two norms along one axis."""

    axis: int = -1
    learns_from_zeros: ClassVar[bool] = False

    def init(self, norm):
        return jax.tree.map(
            lambda n: jnp.stack([jnp.ones_like(n)] * 2, self.axis), norm
        )

    def update(self, seen, memory):
        limit = jax.tree.map(lambda old: old.mean(-1), memory)
        return limit, jax.tree.map(
            lambda old, norm: jnp.stack([old[..., 1], norm], -1), memory, seen.norm
        )


@pytest.mark.parametrize("scope", ["slice", "unit", "layer", "matrix", "element"])
@pytest.mark.parametrize("length", [2, 3])
def test_memory_of_user_rule_begins_with_axes_of_norm_or_raises(scope, length):
    """A window as long as the norms is not mistaken for them."""
    tree = {name: np.ones((length, 2, 3), np.float32) for name in "ab"}
    optclip.clip_by(LastTwo(), over=SCOPES[scope]).init(tree)
    with pytest.raises(
        ValueError, match="must begin with the axes of their norm, got shape"
    ):
        optclip.clip_by(LastTwo(axis=0), over=SCOPES[scope]).init(tree)


@pytest.mark.parametrize(("rule", "scope"), CASES)
def test_broken_norm_learns_as_without_its_steps_and_stops_no_other(rule, scope):
    each = RULES | {"initial_norm": T.initial_norm(0.5), "user's window": LastTwo()}
    tx = optclip.clip_by(each[rule], over=SCOPES[scope], record=False, nonfinite="zero")
    rng = np.random.default_rng(0)
    shape = (14, 2, 2, 3)
    updates = {name: np.float32(rng.lognormal(size=shape)) for name in ("a", "b")}
    updates["b"][12] *= 9
    order = ORDERS[CASES.index((rule, scope)) % len(ORDERS)]
    # Zeros teach some rules, which then have healthy norms in their place.
    learns_zero = rule in WITH_ZEROS or rule == "initial_norm"
    values = np.resize([x or float(learns_zero) for x in order], 6)
    bad = [i for i, x in zip(BROKEN, values, strict=True) if x != 1.0]
    good = [i for i in range(len(updates["b"])) if i not in bad]
    broken = {"a": updates["a"], "b": updates["b"].copy()}
    # A leaf, its first slice or its first row of elements.
    place = slice(None) if "leaf" in scope else slice(1)
    broken["b"][BROKEN, place] = values[:, None, None, None]
    # The same program: the steps that teach, then the others.
    without = {name: x[[*good, *bad]] for name, x in broken.items()}
    # One rule learns from parameters, which may be broken where the updates are not.
    of_params = rule == "initial_norm"
    full = {name: x[[*good, *bad]] for name, x in updates.items()}
    outs, healthy, alone = (
        over_steps(tx, y if of_params else x, x if of_params else y, gradients=x)[0]
        for x, y in ((broken, updates), (updates, updates), (without, full))
    )
    np.testing.assert_array_equal(outs["a"], healthy["a"])
    if "leaf" not in scope:
        np.testing.assert_array_equal(outs["b"][:, 1:], healthy["b"][:, 1:])
    found, expected = outs["b"][good, place], alone["b"][: len(good), place]
    np.testing.assert_array_equal(found, expected)
    assert np.any(found != (updates if of_params else broken)["b"][good, place])


@dataclasses.dataclass(frozen=True)
class MeanAndSteps:
    """A user's rule, with a part of the memory per norm and a shared count."""

    learns_from_zeros: ClassVar[bool] = False

    def init(self, norm):
        return {"mean": jax.tree.map(jnp.zeros_like, norm), "steps": jnp.int32(0)}

    def update(self, seen, memory):
        mean = jax.tree.map(lambda m, n: (m + n) / 2, memory["mean"], seen.norm)
        return 9.0, {"mean": mean, "steps": memory["steps"] + 1}


def test_shared_memory_of_user_rule_changes_if_any_norm_teaches():
    steps = {"a": np.float32([[4], [0], [6], [2]]), "b": np.float32([[8], [4]] * 2)}
    steps["b"][1:3] = [[np.nan], [np.inf]]
    _, states = over_steps(optclip.clip_by_norm(MeanAndSteps()), steps)
    ((memory,),) = helpers.memories(states)
    means, taught = (jax.tree.leaves(memory[key])[0] for key in ("mean", "steps"))
    np.testing.assert_array_equal(means[-1], [3.0, 4.0])
    np.testing.assert_array_equal(taught, [1, 1, 2, 3])


# In `skip` no norm or loss enters its own threshold, for each rule.

# Their threshold is a fraction of this step's norm, or of all norms of the step.
FRACTIONS = {"current": T.current(), "previous_norm": T.previous_norm(1.0)}
WARM = {"ema, warm to 1": T.ema(1.1, 0.5, warmup=3)}
OF_TREES = {
    "initial_norm": T.initial_norm(),
    "of_gradients": RULES["of_gradients"],
    "relative_to_params": T.relative_to_params(),
}
EACH = RULES | FRACTIONS | WARM | OF_TREES | {
    "of": T.of("max", T.quantile(1.0, 4)),
    "scaled": T.scaled(T.quantile(1.0, 4), 10.0),
}  # fmt: skip
LAST = np.float32([1e-3, 0.0, 1.0, 1e6, np.nan, np.inf])


@pytest.mark.parametrize(
    ("name", "over"),
    [
        (name, over)
        for i, name in enumerate(EACH)
        for over in covering.rotated(["leaf", "tree"], i)
    ],
)
def test_threshold_of_skip_is_the_same_with_any_last_norm_and_loss(name, over):
    rule = EACH[name]
    limits = {"max_norm": rule} | ({} if name in OF_TREES else {"max_loss": rule})
    tx = optclip.skip(optax.identity(), **limits, over=over, record="leaves")
    params = {"a": jnp.ones(2), "b": jnp.ones(2)}

    def step(state, size):
        def after(last):
            tree = {"a": size[0] * DIRECTION, "b": last * DIRECTION}
            new = tx.update(tree, state, params, value=last, gradients=tree)[1]
            metrics = optclip.metrics(new)
            return new, {k: x for k, x in metrics.items() if "threshold" in k}

        return after(size[1])[0], jax.vmap(lambda last: after(last)[1])(LAST)

    sizes = np.float32(np.random.default_rng(0).lognormal(size=(8, 2)))
    run = helpers.quick_jit(lambda: jax.lax.scan(step, tx.init(params), sizes)[1])
    found = np.stack(jax.tree.leaves(run()))
    is_same = (found == found[..., :1]).all()
    assert is_same != (name in FRACTIONS or (name in WARM and over == "leaf"))
    assert np.isfinite(found[:, -1]).all()
    if name in RULES.keys() - FRACTIONS:
        assert np.isinf(found[:, 0]).all()


@pytest.mark.parametrize("name", [x for x in EACH if x not in OF_TREES])
def test_rule_before_it_learns_returns_the_same_memory(name):
    rule = EACH[name]
    norms = np.random.default_rng(0).lognormal(size=(6, 2, 3))
    memory = rule.init({"a": jnp.zeros(3), "b": jnp.zeros(3)})
    for a, b in norms:
        step = seen({"a": a, "b": b})
        _, new = rule.update(step, memory)
        limits, same = rule.update(step._replace(includes_norm=False), memory)
        helpers.assert_identical(same, new)
        other = seen({"a": a, "b": 9 * b})._replace(includes_norm=False)
        if name not in FRACTIONS | WARM:
            helpers.assert_identical(rule.update(other, memory)[0], limits)
        memory = new


@pytest.mark.parametrize("rule", [x for x in RULES if covering.full or "," not in x])
def test_leaf_reset_by_carry_over_starts_anew_beside_others(rule):
    warm = {"second_moment": dataclasses.replace(RULES["second_moment"], warmup=2)}
    scope = "element" if rule in OF_ELEMENTS else "leaf"
    tx = optclip.clip_by((RULES | warm)[rule], over=scope)
    steps = np.float32(np.random.default_rng(0).lognormal(size=(12, 2, 3)))
    steps[-1] *= 9
    update = helpers.quick_jit(lambda x, state: tx.update(x, state, gradients=x))

    def run(state, steps):
        outs = []
        for a, b in steps:
            out, state = update({"a": a, "b": b}, state)
            outs.append([out["a"], out["b"]])
        return np.array(outs), state

    both, one = {"a": steps[0, 0], "b": steps[0, 1]}, {"a": steps[0, 0]}
    _, half = run(tx.init(both), steps[:6])
    whole, new = (run(state, steps[6:])[0] for state in (half, tx.init(both)))
    without = optclip.carry_over(tx, both, half, tx, one)
    reset, _ = run(optclip.carry_over(tx, one, without, tx, both), steps[6:])
    np.testing.assert_array_equal(reset[:, 0], whole[:, 0])
    np.testing.assert_array_equal(reset[:, 1], new[:, 1])
    assert np.any(reset[:, 1] != steps[6:, 1])
