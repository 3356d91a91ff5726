"""Map functions over a 4 x 2 mesh, for a tree with its specs."""

import jax
import numpy as np
from jax import P
from jax.sharding import AxisType

from tests.support import helpers

SPECS = {"both": P("data", "model"), "split": P("data"), "whole": P()}
TREE = {
    "both": np.arange(8.0, dtype=np.float32).reshape(4, 2) + 1,
    "split": np.full(4, 2.0, np.float32),
    "whole": np.array([3.0, 4.0], np.float32),
}
WHOLE = P()


def mesh_of(kind=AxisType.Auto):
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)


def mapped(function, out=WHOLE, *, check_vma=True, specs=SPECS):
    return helpers.quick_jit(
        jax.shard_map(
            function,
            mesh=mesh_of(),
            in_specs=(specs,),
            out_specs=out,
            check_vma=check_vma,
        )
    )


def square_norm(*leaves):
    return np.sqrt(sum(np.sum(np.float64(x) ** 2) for x in leaves))


NORM = square_norm(*TREE.values())
