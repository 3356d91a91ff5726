"""A tree, its specs on a mesh of 4 x 2, and functions mapped over that."""

import jax
import numpy as np
import pytest
from jax import P
from jax.sharding import AxisType

from tests.support import helpers

MESH_SHAPE = (4, 2)
SPECS = {"both": P("data", "model"), "split": P("data"), "whole": P()}
TREE = {
    "both": np.arange(8.0, dtype=np.float32).reshape(4, 2) + 1,
    "split": np.full(4, 2.0, np.float32),
    "whole": np.array([3.0, 4.0], np.float32),
}
NORM = np.sqrt(sum(np.sum(x.astype(np.float64) ** 2) for x in TREE.values()))


WHOLE = P()


def mapped(function, out=WHOLE, *, check_vma=True, specs=SPECS):
    mesh = jax.make_mesh(MESH_SHAPE, ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    return helpers.quick_jit(
        jax.shard_map(
            function, mesh=mesh, in_specs=(specs,), out_specs=out, check_vma=check_vma
        )
    )


def square_norm(*leaves):
    return np.sqrt(sum(np.sum(np.float64(x) ** 2) for x in leaves))


def refused(function, error, match, **kwargs):
    with pytest.raises(error, match=match):
        mapped(function, **kwargs)(TREE)
