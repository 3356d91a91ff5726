"""Gradients of examples on meshes are those of one device, each example counted once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P
from jax.sharding import AxisType, NamedSharding

import optclip
from optclip import per_example
from optclip.per_example import QuantileThreshold, clipped_grad, norms

BATCH = jax.random.normal(jax.random.key(0), (16, 6))
PARAMS = {
    "w": jax.random.normal(jax.random.key(1), (6, 8)) / 2,
    "v": jax.random.normal(jax.random.key(2), (8, 3)) / 2,
    "b": jnp.ones(3),
}
SPLIT = {"w": P(None, "model"), "v": P("model", None), "b": P()}
WHOLE = {"w": P(), "v": P(), "b": P()}
PADDING = jnp.arange(16) % 5 == 3
BOUND = 10.5


def loss(params, example, *, axis_name=None):
    """Two layers, of which the first is split by column and the second by row."""
    hidden = jnp.tanh(jnp.dot(example, params["w"], precision="highest"))
    out = jnp.dot(hidden, params["v"], precision="highest")
    out = out if axis_name is None else jax.lax.psum(out, axis_name)
    return jnp.sum((out + params["b"]) ** 2)


def mesh_of(shape, kind=AxisType.Auto):
    names = ("data", "model")[: len(shape)]
    devices = np.array(jax.devices()[: np.prod(shape)]).reshape(shape)
    return jax.sharding.Mesh(devices, names, axis_types=(kind,) * len(shape))


def wanted(padding=PADDING, **options):
    f = jax.jit(clipped_grad(loss, BOUND, strict=False, **options))
    grads, info = f(PARAMS, BATCH, padding=padding)
    assert 0 < (info.coefficients < 1)[~info.padding].sum() < (~info.padding).sum()
    return grads, info


def assert_same(found, other):
    def same(a, b):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_allclose(a, b, 1e-6, 1e-6 * np.abs(b).max(initial=0))

    jax.tree.map(same, found, other)


def placed(mesh, tree, specs):
    return jax.tree.map(
        lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), tree, specs
    )


@pytest.mark.parametrize("method", ["vmap", "ghost"])
@pytest.mark.parametrize("size", [None, 4, 6])
@pytest.mark.parametrize("shape", [(8,), (2, 4)], ids=str)
def test_under_jit_each_example_counts_once(shape, size, method):
    mesh = mesh_of(shape)
    specs = SPLIT if len(shape) == 2 else WHOLE
    params = placed(mesh, PARAMS, specs)
    batch, padding = placed(mesh, (BATCH, PADDING), (P("data"), P("data")))
    f = clipped_grad(loss, BOUND, strict=False, microbatch_size=size, method=method)
    found = jax.jit(f)(params, batch, padding=padding)
    assert_same(found, wanted(microbatch_size=size))


@pytest.mark.parametrize("size", [None, 1])
@pytest.mark.parametrize("shape", [(8,), (2, 4)], ids=str)
def test_in_shard_map_each_example_counts_once(shape, size):
    mesh = mesh_of(shape)
    split = len(shape) == 2
    specs = SPLIT if split else WHOLE
    own = functools.partial(loss, axis_name="model" if split else None)
    f = clipped_grad(own, BOUND, strict=False, microbatch_size=size)
    g = norms(own, microbatch_size=size)
    rule = QuantileThreshold(0.5, init_value=BOUND)

    def step(params, batch, padding):
        found, info = f(params, batch, padding=padding)
        _, measured = g(params, batch, padding=padding)
        return found, info, measured, rule.update(rule.init(), info)

    rows = P("data")
    info_specs = per_example.ExampleInfo(*[rows] * 5, aux=None)
    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=(specs, rows, rows),
        out_specs=(specs, info_specs, rows, P()),
    )  # fmt: skip
    found, info, measured, state = jax.jit(mapped)(PARAMS, BATCH, PADDING)
    grads, one = wanted()
    assert_same((found, info, measured), (grads, one, one.norms))
    assert_same(state, rule.update(rule.init(), one))


def test_a_threshold_learns_from_all_devices_without_padding():
    rule = QuantileThreshold(0.5, init_value=BOUND)

    def step(params, batch):
        _, info = clipped_grad(loss, BOUND)(params, batch)
        return rule.update(rule.init(), info)

    mapped = jax.shard_map(
        step, mesh=mesh_of((8,)), in_specs=(P(), P("data")), out_specs=P()
    )
    assert_same(mapped(PARAMS, BATCH), step(PARAMS, BATCH))


def test_given_gradients_are_refused_where_devices_have_others():
    mapped = jax.shard_map(
        lambda g: per_example.clipped_sum(g, 1.0)[0], mesh=mesh_of((8,)),
        in_specs=P("data"), out_specs=P(),
    )  # fmt: skip
    with pytest.raises(ValueError, match="must be whole on each device.*clipped_grad"):
        mapped(BATCH)


@pytest.mark.parametrize("padding", [PADDING, None], ids=["padding", "no_padding"])
@pytest.mark.parametrize("method", ["vmap", "auto"])
@pytest.mark.parametrize("size", [None, 16, 8, 6])
def test_clipped_grad_on_explicit_axes_equals_one_device(size, method, padding):
    mesh = mesh_of((8,), AxisType.Explicit)
    expected = wanted(padding, microbatch_size=size)
    with jax.set_mesh(mesh):
        params = placed(mesh, PARAMS, WHOLE)
        batch = placed(mesh, BATCH, P("data"))
        if padding is not None:
            padding = placed(mesh, padding, P("data"))
        f = clipped_grad(loss, BOUND, strict=False, microbatch_size=size, method=method)
        assert_same(jax.jit(f)(params, batch, padding=padding), expected)


@pytest.mark.parametrize("make", [functools.partial(clipped_grad, threshold=1), norms])
@pytest.mark.parametrize(
    ("spec", "size"), [(P("data"), None), (P("data"), 1), (P(None, "model"), None)]
)
def test_sharded_parameter_on_explicit_axes_raises(spec, size, make):
    mesh = mesh_of((2, 4), AxisType.Explicit)
    with jax.set_mesh(mesh):
        params = placed(mesh, PARAMS, WHOLE | {"w": spec})
        batch = placed(mesh, BATCH, P("data"))
        with pytest.raises(ValueError, match="whole .* Explicit axes, got 'w'.*Auto"):
            jax.jit(make(loss, microbatch_size=size))(params, batch)


def test_sharded_parameter_on_explicit_axes_takes_single_examples():
    mesh = mesh_of((2, 4), AxisType.Explicit)
    with jax.set_mesh(mesh):
        params = placed(mesh, PARAMS, WHOLE | {"w": P(None, "model")})
        batch, padding = placed(mesh, (BATCH, PADDING), (P("data"), P("data")))
        f = clipped_grad(loss, BOUND, strict=False, microbatch_size=1)
        found = jax.jit(f)(params, batch, padding=padding)
    assert_same(found, wanted(microbatch_size=1))


def test_norms_alone_are_refused_on_explicit_axes():
    mesh = mesh_of((8,), AxisType.Explicit)
    with jax.set_mesh(mesh):
        batch = placed(mesh, BATCH, P("data"))
        f = clipped_grad(loss, BOUND, method="ghost")
        with pytest.raises(ValueError, match="over Explicit mesh axes"):
            f(placed(mesh, PARAMS, WHOLE), batch)


@pytest.mark.parametrize("method", ["ghost", "auto"])
def test_norms_alone_in_shard_map_are_right_or_refused(method):
    def of(own, specs, mesh):
        f = clipped_grad(own, BOUND, strict=False, method=method)
        return jax.shard_map(
            lambda *given: f(*given)[0], mesh=mesh, in_specs=(specs, P("data")),
            out_specs=specs,
        )  # fmt: skip

    found = jax.jit(of(loss, WHOLE, mesh_of((8,))))(PARAMS, BATCH)
    plain, _ = clipped_grad(loss, BOUND, strict=False)(PARAMS, BATCH)
    assert_same(found, plain)
    split = of(functools.partial(loss, axis_name="model"), SPLIT, mesh_of((2, 4)))
    if method == "ghost":
        with pytest.raises(ValueError, match="split inside shard_map"):
            split(PARAMS, BATCH)
    else:
        assert_same(jax.jit(split)(PARAMS, BATCH), plain)


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
    """In shard_map an example would change the gradients of others, unseen by a clip."""
    f = clipped_grad(COUPLED[name], 1.0, method=method)
    step = jax.shard_map(
        lambda *given: f(*given)[0], mesh=mesh_of((8,)), in_specs=(P(), P("data")),
        out_specs=P(),
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"must not combine examples .*`psum"):
        step(jnp.ones(3), (jnp.ones((8, 3)),))


def test_parameters_split_as_examples_are_refused_in_shard_map():
    mesh = mesh_of((8,))

    def step(w, batch):
        def one(w, x):
            return jnp.sum(jax.lax.all_gather(w, "data", tiled=True) * x[0])

        return clipped_grad(one, 1.0)(w, batch)[0]

    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=(P("data"), P("data")), out_specs=P("data")
    )
    with pytest.raises(
        ValueError, match=r"must be whole .* split over .*'data'.*Gather"
    ):
        mapped(jnp.ones(8), BATCH)


def test_without_types_it_is_refused():
    def step(params, batch):
        return clipped_grad(loss, 1.0)(params, batch)[0]

    mapped = jax.shard_map(
        step, mesh=mesh_of((8,)), in_specs=(P(), P("data")), out_specs=P(),
        check_vma=False,
    )  # fmt: skip
    with pytest.raises(ValueError, match="Leave check_vma on"):
        mapped(PARAMS, BATCH)
