"""`jax.export` of clipping with symbolic sizes of leaves or batches."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import optclip
from optclip import functional as F
from optclip import per_example
from tests.support import covering, helpers

CLIPS = {
    "global": lambda g: F.clip_by_global_norm(g, 1.0)[0],
    "leaf": lambda g: F.clip_by_norm(g, 1.0),
    "rows": lambda g: F.clip_by_norm(g, 1.0, axis=1),
    "columns": lambda g: F.clip_by_norm(g, 1.0, axis=0),
    "rms": lambda g: F.clip_by_rms(g, 1.0),
    "average": lambda g: F.clip_by_average_norm(g, 0.1),
    "cubic": lambda g: F.clip_by_norm(g, 1.0, ord=3.0),
    "strict": lambda g: F.clip_by_global_norm(g, 1.0, strict=True)[0],
    "value": lambda g: F.clip_by_value(g, lower=-1.0, upper=1.0),
    "agc": lambda g: helpers.clipped(optclip.recipes.agc(0.01), g, g),
    "recorded": lambda g: helpers.clipped(optclip.clip_by_norm(1.0, axis=0), g),
    "recorded rows": lambda g: helpers.clipped(optclip.clip_by_norm(1.0, axis=1), g),
    "recorded value": lambda g: helpers.clipped(optclip.clip_by_value(1.0), g),
}


@helpers.quick_jit
def clip_by_all(g):
    return {name: clip(g) for name, clip in CLIPS.items()}


@pytest.mark.parametrize("dtype", ["float16", *["float32"] * covering.full])
def test_clips_export_symbolic_leaf_size(dtype):
    (b,) = export.symbolic_shape("b")
    exported = export.export(clip_by_all)(jax.ShapeDtypeStruct((b, 3), dtype))
    for size in (1, 50):
        x = (np.random.default_rng(0).normal(size=(size, 3)) * 3).astype(dtype)
        found = exported.call(x)
        chex.assert_trees_all_close(found, clip_by_all(x), rtol=2e-3)
        assert all(helpers.differs(clipped, x) for clipped in found.values())


def example_loss(w, x):
    return jnp.sum(w * x)


@pytest.mark.parametrize("reduce", ["sum", "none"])
def test_clipped_grad_exports_symbolic_batch(reduce):
    def loss(w, x, scale):
        return scale[0] * example_loss(w, x)

    given = {"reduce": reduce, "strict": False, "batch_argnums": 1}
    clip = per_example.clipped_grad(loss, 1.0, **given)
    measure = per_example.norms(example_loss)

    def function(batch, padding):
        w = jnp.zeros(3)
        total, _ = per_example.clipped_sum(batch, 1.0, padding=padding, strict=False)
        return (
            total,
            clip(w, batch, np.ones(1), padding=padding)[0],
            measure(w, batch)[1],
        )

    (b,) = export.symbolic_shape("b")
    shapes = jax.ShapeDtypeStruct((b, 3), "float32"), jax.ShapeDtypeStruct((b,), "bool")
    exported = export.export(jax.jit(function))(*shapes)
    for size in (1, 50):
        x = np.random.default_rng(0).normal(size=(size, 3)) * 3
        padding = np.arange(size) % 4 == 3
        norm = np.linalg.norm(x, axis=1)
        clipped = np.where(padding[:, None], 0, x / np.maximum(norm, 1)[:, None])
        assert (norm > 1).any()
        expected = clipped.sum(0), clipped if reduce == "none" else clipped.sum(0), norm
        found = exported.call(np.float32(x), padding)
        chex.assert_trees_all_close(found, expected, rtol=1e-5, atol=1e-6)


def test_ghost_norms_export_symbolic_length_of_examples():
    def loss(w, x):
        return jnp.sum(jnp.tanh(x @ w))

    measure = per_example.norms(loss, method="ghost")
    w, x = np.eye(3, dtype=np.float32), np.ones((4, 7, 3), np.float32)
    given = jax.ShapeDtypeStruct(export.symbolic_shape("4, b, 3"), "float32")
    exported = export.export(jax.jit(lambda x: measure(w, x)[1]))(given)
    # Each of 9 entries of the gradient is 7 times the slope at 1.
    expected = np.full(4, 3 * 7 / np.cosh(1) ** 2)
    np.testing.assert_allclose(exported.call(x), expected, rtol=1e-5)


def test_singular_values_export_larger_side_with_bound():
    (b,) = export.symbolic_shape("b", constraints=["b >= 3"])
    function = jax.jit(lambda x: F.clip_by_singular_value(x, 1.0))
    exported = export.export(function)(jax.ShapeDtypeStruct((3, b), "float32"))
    u, s, vh = np.linalg.svd(np.random.default_rng(0).normal(size=(3, 7)), False)
    x = jnp.asarray(u * s @ vh, jnp.float32)
    assert (s > 1).any()
    np.testing.assert_allclose(
        exported.call(x), u * np.minimum(s, 1) @ vh, rtol=0, atol=1e-5
    )


@pytest.mark.parametrize(
    ("function", "shape", "words"),
    [
        (
            lambda x: per_example.clipped_grad(
                example_loss, 1.0, microbatch_size=2
            )(jnp.ones(3), x),
            "b, 3",
            "static batch size.* symbolic size b, microbatch_size=2.*microbatch_size=None",
        ),
        (
            lambda x: per_example.norms(example_loss, method="ghost")(jnp.ones(3), x),
            "b, 3",
            "static batch size.* method='ghost'.*method='vmap'",
        ),
        (
            lambda x: F.clip_by_singular_value(x, 1.0),
            "b, 3",
            r"smaller side .* must be static .*\(b, 3\).*bound the symbol",
        ),
        (
            lambda x: F.max_attention_logit(x, x),
            "b, 2, 3",
            r"length .* of `query` must be static .*\(b, 2, 3\)",
        ),
    ],
    ids=["microbatches", "ghost", "singular_values", "logits"],
)  # fmt: skip
def test_symbolic_size_that_must_be_static_raises(function, shape, words):
    given = jax.ShapeDtypeStruct(export.symbolic_shape(shape), "float32")
    with pytest.raises(ValueError, match=words):
        export.export(jax.jit(function))(given)


def test_agc_exports_to_each_platform_with_few_lines_per_leaf():
    tx = optclip.recipes.agc(0.01)
    update = jax.jit(tx.update)

    def exported(leaves):
        tree = [jnp.arange(48.0).reshape(8, 6)] * leaves
        arguments = [tree, tx.init(tree), tree]
        platforms = "cpu", "cuda", "tpu"
        return export.export(update, platforms=platforms)(*arguments), arguments

    few, arguments = exported(8)
    chex.assert_trees_all_equal(few.call(*arguments), update(*arguments))
    more = exported(16)[0].mlir_module().count("\n") - few.mlir_module().count("\n")
    assert 0 < more <= 8 * 42
