"""What the compiled program of ghost norms keeps, and what it does not."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from optclip.per_example._ghost._choice import choice_of
from tests.support.per_example_oracle import scaled_squares

BATCH, T, WIDTH, LAYERS, WORDS = 64, 4, 256, 2, 1000


def loss(p, ids):
    h = p["words"][ids]
    h = lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, p["layers"])[0]
    return jnp.sum(jnp.tanh(h @ p["head"]))


@pytest.fixture(scope="module")
def compiled():
    shapes = {
        "words": (WORDS, WIDTH),
        "layers": (LAYERS, WIDTH, WIDTH),
        "head": (WIDTH, 2 * WIDTH),
    }
    params = {k: jax.ShapeDtypeStruct(v, jnp.float32) for k, v in shapes.items()}
    ids = jax.ShapeDtypeStruct((BATCH, T), jnp.int32)
    kinds = choice_of(
        loss, jax.tree.map(lambda x: jnp.zeros(x.shape), params), jnp.zeros(T, int)
    ).kinds
    assert kinds == {"words": "embedding", "layers": "gram", "head": "gram"}
    run = jax.jit(lambda p, ids: scaled_squares(loss, p, ids))
    return run.lower(params, ids).compile(), params


def test_there_is_no_buffer_of_the_batch_by_a_leaf(compiled):
    program, params = compiled
    shapes = re.findall(r"f32\[([0-9,]+)\]", program.as_text())
    largest = max(math.prod(map(int, shape.split(","))) for shape in shapes)
    # The leaves themselves are the largest arrays, and some examples' at once.
    assert largest <= 2**20
    assert largest < BATCH * min(x.size for x in params.values()) / 2


def test_memory_is_that_of_activations(compiled):
    program, params = compiled
    num_bytes = program.memory_analysis().temp_size_in_bytes
    leaves = 4 * sum(x.size for x in params.values())
    assert num_bytes < BATCH * leaves / 5


def test_what_is_planned_counts_what_is_kept():
    p = {"w": jnp.zeros((3, 5)), "b": jnp.zeros(5)}
    found = choice_of(lambda p, x: jnp.sum(x @ p["w"] + p["b"]), p, jnp.zeros((2, 3)))
    # x, and the cotangents of the product and of the sum.
    assert found.kept == 4 * (2 * 3 + 2 * 5 + 2 * 5)
    assert found.kinds == {"w": "gram", "b": "bias"}
    # Two products of positions, and the copies of what they are made of.
    assert found.work == 4 * (2 * 2 * 2 + 2 * 3 + 2 * 5)


def test_a_loss_is_traced_once_however_many_examples():
    traces = []

    def counted(p, x):
        traces.append(x.shape)
        return jnp.sum(x @ p)

    run = jax.jit(lambda p, x: scaled_squares(counted, p, x))
    for _ in range(3):
        run(jnp.ones((3, 2)), np.ones((5, 3), np.float32))
    assert traces == [(3,)]
