"""Memory and traces of ghost norms."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from optclip.per_example import norms

BATCH, T, WIDTH, LAYERS, WORDS = 64, 4, 256, 2, 1000


def loss(p, ids):
    h = p["words"][ids]
    h = lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, p["layers"])[0]
    return jnp.sum(jnp.tanh(h @ p["head"]))


def test_ghost_norms_allocate_no_batch_of_gradients():
    shapes = {
        "words": (WORDS, WIDTH),
        "layers": (LAYERS, WIDTH, WIDTH),
        "head": (WIDTH, 2 * WIDTH),
    }
    params = {k: jax.ShapeDtypeStruct(v, jnp.float32) for k, v in shapes.items()}
    ids = jax.ShapeDtypeStruct((BATCH, T), jnp.int32)
    f = norms(loss, method="ghost")
    given = params, ids
    kinds = f.plan(*jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), given)).leaves
    assert kinds == {"words": "embedding", "layers": "gram", "head": "gram"}
    program = jax.jit(f).lower(*given).compile()
    found = re.findall(r"f32\[([0-9,]+)\]", program.as_text())
    largest = max(math.prod(map(int, shape.split(","))) for shape in found)
    # The leaves themselves are the largest arrays, and the gradients of few examples.
    assert largest <= 2**20
    assert largest < BATCH * min(x.size for x in params.values()) / 2
    leaves = 4 * sum(x.size for x in params.values())
    assert program.memory_analysis().temp_size_in_bytes < BATCH * leaves / 5


def test_plan_counts_data_cotangents_and_products():
    p = {"w": np.zeros((3, 5)), "b": np.zeros(5)}
    f = norms(lambda p, x: jnp.sum(x @ p["w"] + p["b"]), method="ghost")
    plan = f.plan(p, np.zeros((1, 2, 3)))
    assert plan.leaves == {"w": "gram", "b": "bias"}
    # x, and the cotangents of the product and of the sum.
    kept = 4 * (2 * 3 + 2 * 5 + 2 * 5)
    # Two products of positions, and the copies of their operands.
    work = 4 * (2 * 2 * 2 + 2 * 3 + 2 * 5)
    assert plan.ghost_bytes == kept + work
    assert plan.vmap_bytes == 4 * (3 * 5 + 5)


def test_ghost_norms_trace_loss_equally_often_for_any_batch():
    def traces(batch):
        shapes = []

        def counted(p, x):
            shapes.append(x.shape)
            return jnp.sum(x @ p)

        f = jax.jit(norms(counted, method="ghost"))
        x = np.ones((batch, 3), np.float32)
        for _ in range(2):
            f.lower(np.ones((3, 2), np.float32), x)
        return shapes

    assert traces(5) == traces(50)
    assert set(traces(5)) == {(3,)}
