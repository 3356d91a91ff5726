"""Gradients of examples on meshes equal one device, and each example counts once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P
from jax.sharding import NamedSharding

import optclip
from optclip import per_example
from optclip.per_example import QuantileThreshold, clipped_grad, norms
from tests.support import covering, meshes
from tests.support.helpers import assert_close, quick_jit

BATCH = np.random.default_rng(0).normal(size=(16, 6)).astype(np.float32)
PARAMS = {
    "w": np.float32(np.random.default_rng(1).normal(size=(6, 8)) / 2),
    "v": np.float32(np.random.default_rng(2).normal(size=(8, 3)) / 2),
    "b": np.ones(3, np.float32),
}
SPLIT = {"w": P(None, "model"), "v": P("model", None), "b": P()}
WHOLE = {"w": P(), "v": P(), "b": P()}
PADDING = np.arange(16) % 5 == 3
OWN = {"weights": np.float32(np.arange(16) % 4 - 1)}
BOUND = 10.5


def loss(params, example, *, axis_name=None):
    """Build two layers, the first sharded by column and the second by row."""
    hidden = jnp.tanh(jnp.dot(example, params["w"], precision="highest"))
    out = jnp.dot(hidden, params["v"], precision="highest")
    out = out if axis_name is None else jax.lax.psum(out, axis_name)
    return jnp.sum((out + params["b"]) ** 2)


def most_weight(own):
    return {"max_weight": 2.0} if own else {}


@functools.cache
def one_device(is_padded=True, is_weighted=False):
    """Return the clipped sum and what each example had, on one device."""
    own = OWN if is_weighted else {}
    f = quick_jit(clipped_grad(loss, BOUND, strict=False, **most_weight(own)))
    grads, info = f(PARAMS, BATCH, padding=PADDING & is_padded, **own)
    assert 0 < (info.coefficients < 1)[~info.padding].sum() < (~info.padding).sum()
    return grads, info


def placed(mesh, tree, specs):
    return jax.tree.map(
        lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), tree, specs
    )


def sharded(mesh, specs):
    with jax.set_mesh(mesh):
        params = placed(mesh, PARAMS, specs)
        return params, *placed(mesh, (BATCH, PADDING), (P("data"), P("data")))


@pytest.mark.parametrize(
    ("shape", "size", "method"),
    [
        ("8", 6, "vmap"),
        ("2x4", 6, "ghost"),
    ]
    + [("8", None, "ghost"), ("2x4", 4, "vmap")] * covering.full,
    ids=str,
)
def test_clipped_grad_under_jit_equals_one_device(shape, size, method):
    specs = SPLIT if shape == "2x4" else WHOLE
    params, batch, padding = sharded(meshes.mesh_of(shape, "auto"), specs)
    own = OWN if method == "ghost" else {}
    f = clipped_grad(
        loss, BOUND, strict=False, microbatch_size=size, method=method,
        **most_weight(own),
    )  # fmt: skip
    found = quick_jit(f)(params, batch, padding=padding, **own)
    assert_close(found, one_device(is_weighted=method == "ghost"))


@pytest.mark.parametrize(("shape", "size"), [("8", 1), ("2x4", None)], ids=str)
def test_clipped_grad_in_shard_map_equals_one_device(shape, size):
    split = shape == "2x4"
    specs, own = (SPLIT, OWN) if split else (WHOLE, {})
    of_one = functools.partial(loss, axis_name="model" if split else None)
    f = clipped_grad(
        of_one, BOUND, strict=False, microbatch_size=size, **most_weight(own)
    )
    g = norms(of_one, microbatch_size=size)
    rule = QuantileThreshold(0.5, init_value=BOUND)

    def step(params, batch, padding, own):
        found, info = f(params, batch, padding=padding, **own)
        _, measured = g(params, batch, padding=padding)
        return found, info, measured, rule.update(rule.init(), info)

    rows = P("data")
    info_specs = per_example.ExampleInfo(*[rows] * 5, aux=None)
    mapped = jax.shard_map(
        step, mesh=meshes.mesh_of(shape, "auto"), in_specs=(specs, rows, rows, rows),
        out_specs=(specs, info_specs, rows, P()),
    )  # fmt: skip
    found, info, measured, state = quick_jit(mapped)(PARAMS, BATCH, PADDING, own)
    grads, one = one_device(is_weighted=split)
    assert_close((found, info, measured), (grads, one, one.norms))
    assert_close(state, rule.update(rule.init(), one))


def on_data(function, **how):
    """Map a function of parameters and a batch over eight devices."""
    specs = {"in_specs": (P(), P("data")), "out_specs": P()}
    return jax.shard_map(function, mesh=meshes.mesh_of("8", "auto"), **(specs | how))


@pytest.mark.parametrize(
    ("size", "method", "is_padded"),
    [(8, "vmap", True), (6, "vmap", False)] + [(None, "vmap", True)] * covering.full,
)
def test_clipped_grad_on_explicit_axes_equals_one_device(size, method, is_padded):
    mesh = meshes.mesh_of("8", "explicit")
    params, batch, padding = sharded(mesh, WHOLE)
    options = {"padding": padding} if is_padded else {}
    own = {} if is_padded else OWN
    f = clipped_grad(
        loss, BOUND, strict=False, microbatch_size=size, method=method,
        **most_weight(own),
    )  # fmt: skip
    with jax.set_mesh(mesh):
        found = quick_jit(f)(params, batch, **options, **own)
    assert_close(found, one_device(is_padded, is_weighted=not is_padded))


GRAD = functools.partial(clipped_grad, threshold=1)
WHOLE_ONLY = "whole .* Explicit axes, got 'w'.*Auto"


@pytest.mark.parametrize(
    ("spec", "size", "make", "words"),
    [
        *(
            (spec, size, make, WHOLE_ONLY)
            for make in (GRAD, norms)
            for spec, size in (
                *((P("data"), None), (P("data"), 1)),
                (P(None, "model"), None),
            )
        ),
        (
            *(P(), None, functools.partial(GRAD, method="ghost")),
            "over Explicit mesh axes",
        ),
    ],
)
def test_sharded_parameter_or_ghost_on_explicit_axes_raises(spec, size, make, words):
    mesh = meshes.mesh_of("2x4", "explicit")
    with jax.set_mesh(mesh):
        params, batch, _ = sharded(mesh, WHOLE | {"w": spec})
        with pytest.raises(ValueError, match=words):
            jax.jit(make(loss, microbatch_size=size))(params, batch)


def test_sharded_parameter_on_explicit_axes_takes_single_examples():
    mesh = meshes.mesh_of("2x4", "explicit")
    given = sharded(mesh, WHOLE | {"w": P(None, "model")})
    f = clipped_grad(loss, BOUND, strict=False, microbatch_size=1)
    with jax.set_mesh(mesh):
        found = quick_jit(f)(*given[:2], padding=given[2])
    assert_close(found, one_device())


def split_parameters(method):
    own = functools.partial(loss, axis_name="model")
    f = clipped_grad(own, BOUND, strict=False, method=method)
    return jax.shard_map(
        lambda *given: f(*given)[0], mesh=meshes.mesh_of("2x4", "auto"), out_specs=SPLIT,
        in_specs=(SPLIT, P("data")),
    )  # fmt: skip


def test_ghost_in_shard_map_equals_one_device_or_raises():
    """Without padding, so too a threshold that learns from the norms."""
    f = clipped_grad(loss, BOUND, strict=False, method="ghost")
    rule = QuantileThreshold(0.5, init_value=BOUND)

    def step(params, batch):
        found, info = f(params, batch)
        return found, rule.update(rule.init(), info)

    found = quick_jit(on_data(step))(PARAMS, BATCH)
    expected, info = one_device(is_padded=False)
    assert_close(found, (expected, rule.update(rule.init(), info)))
    with pytest.raises(ValueError, match="split inside shard_map"):
        jax.eval_shape(split_parameters("ghost"), PARAMS, BATCH)
    assert_close(quick_jit(split_parameters("vmap"))(PARAMS, BATCH), expected)


COUPLED = {
    "psum of the loss": lambda w, x: jax.lax.psum(jnp.sum(w * x[0]), "data"),
    "psum": lambda w, x: jnp.sum(w * x[0] * jax.lax.psum(jnp.sum(x[0]), "data")),
    "clip_cotangent": lambda w, x: jnp.sum(
        jax.jit(lambda h: optclip.clip_cotangent(h, 0.1, axis=None))(w * x[0]) ** 2
    ),
}


@pytest.mark.parametrize("name", COUPLED)
@pytest.mark.parametrize("method", ["vmap", "ghost"])
def test_clipped_grad_with_collective_over_examples_raises(name, method):
    """In shard_map an example would change the gradients of others, undetected."""
    f = clipped_grad(COUPLED[name], 1.0, method=method)
    mapped = on_data(lambda *given: f(*given)[0])
    with pytest.raises(ValueError, match=r"must not combine examples .*`psum"):
        jax.eval_shape(mapped, np.ones(3), (np.ones((8, 3)),))


def gathering(w, x):
    return jnp.sum(jax.lax.all_gather(w, "data", tiled=True) * x[0])


@pytest.mark.parametrize(
    ("function", "how", "words"),
    [
        (
            lambda w, x: clipped_grad(gathering, 1.0)(w, x)[0],
            {"in_specs": (P("data"), P("data")), "out_specs": P("data")},
            r"must be whole .* split over .*'data'.*Gather",
        ),
        (
            lambda _, grads: per_example.clipped_sum(grads, 1.0)[0],
            {},
            "must be whole on each device.*clipped_grad",
        ),
        (
            lambda w, x: clipped_grad(gathering, 1.0)(w, x)[0],
            {"check_vma": False},
            "Use shard_map with check_vma=True",
        ),
    ],
)
def test_clipped_grad_of_unclear_split_raises(function, how, words):
    with pytest.raises(ValueError, match=words):
        jax.eval_shape(on_data(function, **how), np.ones(8, np.float32), BATCH)
