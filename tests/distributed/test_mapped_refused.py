"""What cannot be right over mapped axes raises, and says what to do."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import P, lax
from jax.sharding import AxisType, NamedSharding

import optclip
from optclip.functional import (
    clip_by_global_norm,
    clip_by_norm,
    clip_by_value,
    global_norm,
)
from tests.support.mapped import SPECS, TREE, mapped, refused


def test_an_unknown_axis_names_those_there_are():
    refused(
        lambda tree: global_norm(tree, axis_name="dta"),
        ValueError,
        r"got 'dta' \(str\). The mesh axes mapped here are"
        r" \('data', 'model'\)",
    )
    with pytest.raises(
        ValueError,
        match="No axis is mapped here: under jax.jit alone leave axis_name out",
    ):
        global_norm(TREE, axis_name="data")


def test_a_tree_that_does_not_match():
    told = {"both": P("data"), "split": P(), "hole": P()}
    refused(
        lambda tree: global_norm(tree, axis_name=told),
        ValueError,
        "`axis_name` must be a prefix of the structure .* It lacks 'whole'.* the unknown 'hole'",
    )


ON_A_MESH = NamedSharding(jax.make_mesh((1,), ("data",), (AxisType.Auto,)), P("data"))


def test_an_axis_named_twice():
    with pytest.raises(ValueError, match="must name each axis once"):
        optclip.clip_by_global_norm(1.0, axis_name=("data", "data"))


@pytest.mark.parametrize(
    "told", [0, 1.5, {"both": 3}, [np.ones(2)], ("data", 1), ON_A_MESH]
)
def test_what_names_no_axis(told):
    with pytest.raises(TypeError, match="`axis_name` must be a name, a tuple"):
        optclip.clip_by_global_norm(1.0, axis_name=told)


def test_a_spec_for_another_leaf():
    refused(
        lambda tree: clip_by_norm(tree, 1.0, axis_name=P("data", None, "model")),
        ValueError,
        r"at most one entry for each dimension of a leaf, got the 3 of",
    )
    refused(
        lambda tree: clip_by_norm(tree, 1.0, axis_name=P(P.UNCONSTRAINED)),
        ValueError,
        "UNCONSTRAINED, which does not say",
    )


CLIPS = {
    "tree": lambda tree, c: clip_by_global_norm(tree, c)[0],
    "leaf": lambda tree, c: clip_by_norm(tree, c)[0],
    "element": lambda tree, c: clip_by_value(tree, lower=-1.0, upper=c),
}


@pytest.mark.parametrize("name", list(CLIPS))
def test_a_threshold_that_differs_by_device(name):
    def clip(tree):
        own = lax.axis_index("model") + 1.0
        return CLIPS[name](tree, own)

    refused(
        clip,
        ValueError,
        r"varies over the mesh axes \('model',\).*lax.pmean",
        out=SPECS,
    )


def test_an_eps_that_differs_by_device():
    def clip(tree):
        return clip_by_global_norm(tree, 1.0, eps=lax.axis_index("model") + 1.0)[0]

    refused(
        clip, ValueError, r"`eps` varies over the mesh axes \('model',\)", out=SPECS
    )


def test_a_threshold_that_differs_where_each_device_clips_by_itself():
    """On purpose: `axis_name=()`."""
    limits = np.array([1.0, 2.0, 0.5, 100.0], np.float32)

    def clip(tree):
        own = jnp.asarray(limits)[lax.axis_index("data")]
        return clip_by_global_norm(tree, own, axis_name=())[0]

    found = mapped(clip, P("data"), specs=P("data"))(TREE["split"])
    np.testing.assert_allclose(found, np.minimum(2.0, limits), rtol=1e-6)


def test_gradients_that_are_not_summed_yet():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x = jax.reshard(jnp.ones((8, 4)), P("data"))
        w = jax.reshard(jnp.ones((8, 3)), P("data"))

        def gradient(x, w):
            return jnp.einsum("bi,bj->ij", x, w, out_sharding=P(unreduced={"data"}))

        @jax.jit
        def clip(x, w):
            return clip_by_global_norm({"kernel": gradient(x, w)}, 1.0)

        with pytest.raises(ValueError, match=r"'kernel' is unreduced .*'data'"):
            clip(x, w)

        @jax.jit
        def reduced(x, w):
            return clip_by_global_norm(jax.reshard(gradient(x, w), P()), 1.0)[1]

        np.testing.assert_allclose(reduced(x, w), 8 * np.sqrt(12), rtol=1e-6)


def test_state_made_inside_has_one_value_everywhere():
    """Clipping each part by itself leaves a record that is the same on all devices."""

    def clip(tree):
        tx = optclip.clip_by_norm(2.5, axis_name=())
        clipped, state = tx.update(tree, tx.init(tree))
        return clipped, optclip.metrics(state)

    clipped, metrics = mapped(clip, (SPECS, P()))(TREE)
    np.testing.assert_allclose(metrics["clip/norm"], 8.0)
    np.testing.assert_allclose(
        clipped["both"], np.minimum(TREE["both"], 2.5), rtol=1e-6
    )


def test_a_loss_that_differs_by_device():
    """All devices skip, or none: the loss that decides is to be the same on all."""

    def step(tree, average):
        tx = optclip.recipes.olmo_skip(optax.sgd(1.0), window=4)
        loss = lax.axis_index("data") + jnp.float32(2)
        loss = lax.pmean(loss, "data") if average else loss
        out, state = tx.update(tree, tx.init(tree), value=loss)
        return out, optclip.metrics(state)["skip/value"]

    with pytest.raises(ValueError, match=r"`value` varies .*pmean\(value, \('data',\)"):
        mapped(lambda tree: step(tree, False), (SPECS, P()))(TREE)
    _, loss = mapped(lambda tree: step(tree, True), (SPECS, P()))(TREE)
    assert loss == 3.5
