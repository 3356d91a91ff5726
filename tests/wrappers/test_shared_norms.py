"""`skip` passes its norms to the clipping inside, which gives the same results."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import sparse

import optclip
from optclip import thresholds
from tests.support import covering, helpers, registry

CLIP = optclip.clip_by_global_norm(0.5)
SGD = optax.sgd(1.0, momentum=0.9)
# Returns equal arrays, of which nothing shows that they were measured.
COPIED = optax.stateless(lambda updates, params: jax.tree.map(lambda x: -x, updates))
TWICE = optax.chain(COPIED, COPIED)
CONTENDERS = optax.identity(), TWICE
SPARSE = optax.stateless(
    lambda updates, params: updates | {"a": sparse.bcoo_fromdense(updates["a"], nse=24)}
)
DENSE = optax.stateless(lambda updates, params: updates | {"a": updates["a"].todense()})
SOME = {"a": True, "b": False, "c": True}
MATRIX = {"a": True, "b": False, "c": False}
PARAMS = {"a": jnp.ones((8, 3)), "b": jnp.ones(5), "c": jnp.ones(2)}


def skipping(inner, **how):
    return optclip.skip(inner, max_norm=50.0, **how)


# Builds a line around a transformation, which stands before the clip.
SHARED = {
    "chain": lambda tx: skipping(optax.chain(tx, CLIP, SGD)),
    "history": lambda tx: skipping(optclip.with_history(optax.chain(tx, CLIP, SGD))),
    "before": lambda tx: skipping(
        optax.chain(tx, optclip.clip_before(optax.scale(-1.0), CLIP))
    ),
    "nested": lambda tx: skipping(skipping(optax.chain(tx, CLIP, SGD), name="inner")),
    "leaves of skip": lambda tx: skipping(optax.chain(tx, CLIP, SGD), record="leaves"),
    "leaves of clip": lambda tx: skipping(
        optax.chain(tx, optclip.clip_by_global_norm(0.5, record="leaves"), SGD)
    ),
    "leaves of both": lambda tx: skipping(
        optax.chain(tx, optclip.clip_by_global_norm(0.5, record="leaves"), SGD),
        record="leaves",
    ),
    "each leaf": lambda tx: skipping(
        optax.chain(tx, optclip.clip_by_norm(0.5), SGD), over="leaf"
    ),
    "columns": lambda tx: skipping(
        optax.chain(tx, optclip.clip_by_norm(0.5, axis=0), SGD), over=optclip.axes(0)
    ),
    "learned": lambda tx: skipping(
        optax.chain(tx, optclip.clip_by_global_norm(thresholds.ema()), SGD)
    ),
    "sparse": lambda tx: optax.chain(SPARSE, skipping(optax.chain(tx, CLIP)), DENSE),
    "L1": lambda tx: skipping(
        optax.chain(tx, optclip.clip_by_norm(0.5, ord=1), SGD), over="leaf", norm="l1"
    ),
}
# Clipping measures other norms than `skip`, or needs more than the norm.
OTHERS = {
    "order": lambda tx: skipping(
        optax.chain(tx, optclip.clip_by_global_norm(0.5, ord=1), SGD)
    ),
    "mask": lambda tx: skipping(optax.chain(tx, CLIP, SGD), mask=SOME),
    "masked": lambda tx: skipping(optax.chain(tx, optax.masked(CLIP, SOME), SGD)),
    "momentum": lambda tx: skipping(optax.chain(tx, optax.trace(0.9), CLIP)),
    "compiled": lambda tx: skipping(_compiled(optax.chain(tx, CLIP, SGD))),
    "singular values": lambda tx: skipping(
        optax.chain(tx, optclip.clip_by_singular_value(0.5, mask=MATRIX)),
        over=optclip.singular_values(),
        mask=MATRIX,
    ),
    "power iteration": lambda tx: skipping(
        optax.chain(
            tx,
            optclip.clip_by_spectral_norm(0.5, method="power_iteration", mask=MATRIX),
        ),
        over=optclip.matrices(),
        norm="spectral",
        mask=MATRIX,
    ),
    "steps": lambda tx: skipping(
        optax.MultiSteps(optax.chain(tx, CLIP, SGD), 2).gradient_transformation()
    ),
}


def _compiled(tx):
    return optax.GradientTransformationExtraArgs(tx.init, jax.jit(tx.update))


def gradients(size):
    return jax.tree.map(lambda x: size * jnp.cumsum(x, 0), PARAMS)


# Steps that are clipped, small, skipped and zero, and two that are not finite.
SIZES = np.float32([1.0, 0.01, 100.0, np.nan, 0.0, np.inf, 0.5, 2.0])


def run_of(tx):
    """Return the function from sizes to updates, metrics and derivatives of steps."""

    def step(carry, size):
        state, _ = carry

        def total(size):
            updates, new = tx.update(gradients(size), state, PARAMS)
            numbers = jax.tree.map(jnp.sum, updates)
            return sum(jax.tree.leaves(numbers)), (updates, new)

        (_, (updates, new)), slope = jax.value_and_grad(total, has_aux=True)(size)
        return (new, slope), (updates, optclip.metrics(new), slope)

    def run(sizes):
        return jax.lax.scan(step, (tx.init(PARAMS), jnp.float32(0)), sizes)[1]

    return run


@pytest.mark.parametrize("name", SHARED | OTHERS)
def test_clip_inside_skip_is_that_of_measured_copies(name):
    line = (SHARED | OTHERS)[name]
    runs = [helpers.quick_jit(run_of(line(tx))) for tx in CONTENDERS]
    shared, measured = (run(SIZES) for run in runs)
    chex.assert_trees_all_close(
        *map(jax.tree.leaves, (shared, measured)), rtol=2e-6, atol=1e-7
    )
    *_, slope = shared
    assert np.all(np.isfinite(slope))
    assert np.any(slope != 0)
    assert any(metric.max() > 0 for metric in shared[1].values())


@pytest.mark.parametrize("name", SHARED)
def test_clip_inside_skip_reduces_less_than_that_of_copies(name):

    def sums(tx):
        tx = SHARED[name](tx)
        lowered = jax.jit(tx.update).lower(PARAMS, tx.init(PARAMS), PARAMS)
        return lowered.compile().as_text().count(" reduce(")

    assert sums(optax.identity()) < sums(TWICE)


# How `skip` measures the norms of each transformation, unless per leaf or as a tree.
SCOPES = {
    "tree": "tree",
    "leaf": "leaf",
    "element": "element",
    "axes": optclip.axes(0),
    "groups": optclip.groups(registry.top_key),
    "matrices": optclip.matrices(),
}
NORMS = {
    "norm-l1": "l1", "average-norm": "average", "rms": "rms", "rms-axis": "rms",
    "global-norm-inf": "inf", "global-norm-3": 3.0, "spectral-norm": "spectral",
    "spectral-norm-by-iteration": "spectral",
}  # fmt: skip
# Recipes that measure the norm of the tree once, and rules of norms, of parameters and
# with a memory of them. The others share no norm, or are given it as these are.
SHARING = {
    "acclip", "auto_s", "autoclip", "axlearn_skip", "mean_std_clip", "megatron_skip",
    "olmo_skip", "zclip", "ema", "initial_norm", "relative_to_params",
}  # fmt: skip
MATCHED = {
    **{
        entry.id: entry.kwargs.get("over") or SCOPES[entry.scope]
        for entry in registry.ENTRIES
        if entry in registry.by_trait() or entry.id in NORMS
    },
    **{
        name: over
        for name, over in {
            **dict.fromkeys(registry.RECIPES, "tree"),
            **registry.RULES,
        }.items()
        if covering.full or name.removeprefix("recipes.") in SHARING
    },
    **dict.fromkeys(registry.WRAPPERS, "leaf"),
}


@pytest.mark.parametrize("name", MATCHED)
def test_transformation_inside_skip_equals_that_of_measured_copies(name):
    tree, params = helpers.gradients(), helpers.gradients(1)

    def results(tx):
        tx = skipping(
            optax.chain(tx, registry.FACTORIES[name]()),
            over=MATCHED[name],
            norm=NORMS.get(name, "l2"),
            name="outer",
        )

        def step(state, size):
            updates = jax.tree.map(lambda x: size * x, tree)
            updates, state = tx.update(updates, state, params, value=jnp.float32(1))
            return state, (updates, state, optclip.metrics(state))

        return jax.lax.scan(step, tx.init(params), SIZES)[1]

    shared, measured = helpers.quick_jit(lambda: [*map(results, CONTENDERS)])()
    # The states differ in structure by the state of `TWICE`.
    chex.assert_trees_all_close(
        *map(jax.tree.leaves, (shared, measured)), rtol=2e-6, atol=1e-7
    )
    np.testing.assert_array_equal(shared[2]["outer/skipped"], [0, 0, 1, 2, 2, 3, 3, 3])


@dataclasses.dataclass(frozen=True)
class Weighted(optclip.norms.Norm):
    """Weigh the elements of each leaf, as a user's norm that holds an array."""

    weights: jax.Array | float = 1.0

    def measure(self, blocks, memory=(), **how):
        leaves = [[leaf.value * self.weights for leaf in x.leaves] for x in blocks]
        return super().measure([*map(optclip.norms.Block, leaves)], memory, **how)


def test_norms_with_arrays_inside_skip_have_derivatives_of_measured_copies():
    x = jnp.arange(3.0)

    def total(weights, tx):
        norm, other = Weighted(weights=weights), Weighted(weights=2 * weights)
        clips = [optclip.clip_by(0.5, norm=each) for each in (norm, other)]
        tx = skipping(optax.chain(tx, *clips), norm=norm)
        return jnp.sum(tx.update(x, tx.init(x))[0])

    slope, expected = (jax.grad(total)(jnp.ones(3), tx) for tx in CONTENDERS)
    assert np.any(slope != 0)
    np.testing.assert_allclose(slope, expected, rtol=2e-6)


@pytest.mark.parametrize("skips", ["leaves", True])
@pytest.mark.parametrize("clips", ["leaves", True])
def test_norms_of_users_class_in_skip_are_the_same_with_those_of_leaves(skips, clips):
    norm = Weighted(weights=2.0)
    clip = optclip.clip_by(0.5, norm=norm, record=clips)
    tx = skipping(clip, norm=norm, record=skips)
    _, state = tx.update([jnp.ones(4), jnp.ones(5)], tx.init([jnp.ones(4)] * 2))
    norms = optclip.metrics(state)
    assert norms["skip/norm"] == norms["clip/norm"] == 6


@pytest.mark.parametrize(("over", "axis_name"), [(jax.vmap, None), (jax.pmap, "i")])
def test_mapped_steps_inside_skip_equal_those_of_measured_copies(over, axis_name):
    """The last of eight has the NaN and the inf: all devices skip these steps."""

    def run(tx):
        clip = optclip.clip_by_global_norm(0.5, record="leaves", axis_name=axis_name)
        return run_of(skipping(optax.chain(tx, clip, SGD), axis_name=axis_name))

    shared, measured = (over(run(tx), axis_name="i") for tx in CONTENDERS)
    finite = np.where(np.isfinite(SIZES), SIZES, np.float32(1.0))
    # The norm of eight devices is larger.
    sizes = np.stack([*[finite] * 7, SIZES]) / 4
    results = shared(sizes)
    chex.assert_trees_all_close(results, measured(sizes), rtol=2e-6, atol=1e-7)
    skipped = [int(steps[-1]) for steps in results[1]["skip/skipped"]]
    assert skipped == ([1] * 7 + [3] if over is jax.vmap else [3] * 8)
