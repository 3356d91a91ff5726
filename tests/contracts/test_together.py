"""Two training steps with every pair of features, against a loop in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import P
from jax.sharding import AxisType, NamedSharding

import optclip
from optclip.per_example import clipped_grad
from tests.support import covering, helpers, oracles

EXAMPLES, LIMIT, COTANGENT, RATE = 8, 0.3, 0.02, 0.1
NORM, SPECTRAL, MAX_LOGIT, LOGITS = 0.05, 0.02, 1.0, (0.5, 4.0)
SHAPES = {"query": (4, 2, 3), "key": (4, 2, 3), "w": (4, 5), "b": (5,)}


def drawn(rng):
    """Return parameters and two batches; `skip` skips the second's larger gradients."""
    params = {name: np.float32(rng.normal(size=s) / 2) for name, s in SHAPES.items()}
    batches = [
        {
            "x": np.float32(rng.normal(size=(EXAMPLES, 3, 4))),
            "y": np.float32(offset + rng.normal(size=(EXAMPLES, 3, 5))),
        }
        for offset in (0, 3)
    ]
    return params, batches


PARAMS, BATCHES = drawn(np.random.default_rng(0))
IS_W, ALL_BUT_B = ({name: f(name) for name in SHAPES} for f in ("w".__eq__, "b".__ne__))
MATRIX = {
    "spectral": optclip.clip_by_spectral_norm,
    "singular": optclip.clip_by_singular_value,
}
MODES = {"auto": AxisType.Auto, "explicit": AxisType.Explicit, "mapped": AxisType.Auto}


def loss(p, example, clip):
    x, y = example["x"], example["y"]
    q, k = (jnp.einsum("td,dhn->htn", x, p[name]) for name in ("query", "key"))
    weights = jax.nn.softmax(jnp.einsum("htn,hsn->hts", q, k))
    h = clip(jnp.einsum("hts,sd->td", weights, x))
    return jnp.sum((jnp.tanh(h @ p["w"] + p["b"]) - y) ** 2)


def transformation(qk, matrix, skip, record, mask):
    """Build the optimizer; `skip` is the norm from which a step is skipped."""
    mask = ALL_BUT_B if mask else None
    parts = [optclip.clip_by_global_norm(NORM, mask=mask, record=record)]
    if matrix:
        parts.append(MATRIX[matrix](SPECTRAL, mask=IS_W, record=record, name="matrix"))
    tx = optax.chain(*parts, optax.sgd(RATE))
    tx = optclip.skip(tx, max_norm=skip, mask=mask) if skip else tx
    if qk:
        layers = optclip.find_heads(PARAMS, query="query", key="key")
        tx = optax.chain(tx, optclip.clip_attention_logits(MAX_LOGIT, layers))
    return tx


def gradient(method, cotangent):
    """Return the gradient of a batch, clipped per example unless `method` is None."""

    def clip(h):
        how = {"axis": None, "axis_name": ()}
        return optclip.clip_cotangent(h, COTANGENT, **how) if cotangent else h

    own = functools.partial(loss, clip=clip)
    if method:
        f = clipped_grad(own, LIMIT, method=method, strict=False, normalize_by=EXAMPLES)
        return lambda p, batch: f(p, batch)[0]

    grad = jax.grad(lambda p, batch: jnp.sum(jax.vmap(own, (None, 0))(p, batch)))
    return lambda p, batch: jax.tree.map(lambda x: x / EXAMPLES, grad(p, batch))


def trained(tx, grad, mesh):
    """Return parameters and state after both steps, on one device or eight."""

    def steps(params, batches):
        more = {"logits": {"attention": jnp.array(LOGITS)}}

        def step(carry, batch):
            params, state = carry
            updates, state = tx.update(grad(params, batch), state, params, **more)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(step, (params, tx.init(params)), batches)[0]

    batches = jax.tree.map(lambda *x: np.stack(x), *BATCHES)
    if mesh is None:
        return helpers.quick_jit(steps)(PARAMS, batches)
    devices = jax.make_mesh((8,), ("data",), axis_types=(MODES[mesh],))
    with jax.set_mesh(devices):
        place = functools.partial(NamedSharding, devices)
        split = P(None, "data")
        given = (
            jax.device_put(PARAMS, place(P())),
            jax.device_put(batches, place(split)),
        )
        if mesh == "mapped":
            steps = jax.shard_map(steps, in_specs=(P(), split), out_specs=(P(), P()))
        return helpers.quick_jit(steps)(*given)


@functools.cache
def float64_gradient(cotangent):
    """Return per-example gradients, with the rule of the cotangent written out."""
    rule = jax.custom_vjp(lambda h: h)
    rule.defvjp(
        lambda h: (h, None),
        lambda _, g: (g * jnp.minimum(1, COTANGENT / jnp.linalg.norm(g)),),
    )
    own = functools.partial(loss, clip=rule if cotangent else lambda h: h)
    return jax.jit(jax.vmap(jax.grad(own), (None, 0)))


def expected(method, cotangent, qk, matrix, skip, mask):
    """Return parameters after both steps, the norms, the last taken, and all clips."""
    p = jax.tree.map(np.float64, PARAMS)
    norms, last, clipped = [], None, set()
    for batch in BATCHES:
        with jax.enable_x64(True):
            wide = jax.tree.map(np.float64, (p, batch))
            grads = jax.tree.map(np.asarray, float64_gradient(cotangent)(*wide))
        of_each = [jax.tree.map(lambda x, i=i: x[i], grads) for i in range(EXAMPLES)]
        if method:
            clipped |= (
                {"example"} if max(map(oracles.tree_norm, of_each)) > LIMIT else set()
            )
            of_each = [oracles.by_tree(g, LIMIT) for g in of_each]
        g = jax.tree.map(lambda *x: sum(x) / EXAMPLES, *of_each)
        seen = {k: x for k, x in g.items() if not mask or k != "b"}
        norms.append(oracles.tree_norm(seen))
        clipped |= {"tree"} if norms[-1] > NORM else set()
        g |= oracles.by_tree(seen, NORM)
        if matrix:
            u, s, v = np.linalg.svd(g["w"], full_matrices=False)
            s = s * min(1, SPECTRAL / s[0]) if matrix == "spectral" else s
            clipped |= {"matrix"} if s[0] >= SPECTRAL else set()
            g["w"] = u * np.minimum(s, SPECTRAL) @ v
        if not skip or norms[-1] <= skip:
            last = norms[-1]
            p = {k: p[k] - RATE * g[k] for k in p}
        else:
            clipped.add("skip")
        if qk:
            root = np.sqrt(np.minimum(1, MAX_LOGIT / np.array(LOGITS)))[:, None]
            p |= {name: p[name] * root for name in ("query", "key")}
    return p, norms, last, clipped


@pytest.mark.covering(
    method=[None, "vmap", "ghost"],
    cotangent=[False, True],
    qk=[False, True],
    matrix=[None, *MATRIX],
    skip=[False, True],
    record=[False, True],
    mask=[False, True],
    mesh=[None, *MODES],
    where=lambda method, matrix, mesh, **_: (
        (method, mesh) != ("ghost", "explicit")
        # These programs compile slowly; tests/distributed has all of both.
        and (covering.full or matrix != "singular" or mesh in (None, "mapped"))
        and (covering.full or mesh != "explicit")
    ),
)
def test_features_together_equal_loop(
    method, cotangent, qk, matrix, skip, record, mask, mesh
):
    _, norms, *_ = expected(method, cotangent, qk, matrix, None, mask)
    limit = np.sqrt(norms[0] * norms[1]) if skip else None
    p, _, last, clipped = expected(method, cotangent, qk, matrix, limit, mask)
    wanted = {"tree": True, "example": method, "matrix": matrix, "skip": skip}
    assert clipped == {name for name, live in wanted.items() if live}
    tx = transformation(qk, matrix, limit, record, mask)
    found, state = trained(tx, gradient(method, cotangent), mesh)
    for name in SHAPES:
        np.testing.assert_allclose(found[name], p[name], rtol=2e-5, atol=1e-6)
    if record:
        norm = optclip.metrics(state)["clip/norm"]
        np.testing.assert_allclose(norm, last, rtol=1e-5)
