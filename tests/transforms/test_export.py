"""`jax.export` of a clip whose leaves are of a size that is not known yet."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import optclip
from optclip import functional as F
from tests.support import helpers

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
    "agc": lambda g: updated(optclip.recipes.agc(0.01), g),
    "recorded": lambda g: updated(optclip.clip_by_norm(1.0, axis=0), g),
    "recorded rows": lambda g: updated(optclip.clip_by_norm(1.0, axis=1), g),
    "recorded value": lambda g: updated(optclip.clip_by_value(1.0), g),
}


def updated(tx, grads):
    return tx.update(grads, tx.init(grads), grads)[0]


@pytest.mark.covering(clip=list(CLIPS), dtype=["float32", "float16"])
def test_sizes_may_be_symbols(clip, dtype):
    function = helpers.quick_jit(CLIPS[clip])
    shape = export.symbolic_shape("b, 3")
    exported = export.export(function)(jax.ShapeDtypeStruct(shape, dtype))
    for size in (1, 50):
        x = jnp.asarray(np.random.default_rng(0).normal(size=(size, 3)) * 3, dtype)
        found = exported.call(x)
        chex.assert_trees_all_close(found, function(x), rtol=2e-3)
        assert helpers.differs(found, x)
