"""Calls over mapped axes that cannot be correct raise, with advice."""

import jax
import jax.numpy as jnp
import numpy as np
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
from tests.support.mapped import SPECS, TREE, mapped


def by_device():
    return lax.axis_index("model") + 1.0


PASSED = optclip.clip_by_global_norm(1.0, use_norm="grad_norm")
EMA = optclip.thresholds.ema()
ROWS = optclip.clip_by(EMA, over=optclip.axes(-1), axis_name=SPECS)


# No type distinguishes a whole leaf from a shard, so any norm could be wrong.
UNTYPED = (
    r"check_vma=False, array types do not specify .* Pass axis_name=\(\) if"
    r" .*pmean\(grads, \('data', 'model'\)\)"
)
MAXIMUM = r"jnp.where\(jax.lax.psum\(.*, jnp.nan, jax.lax.pmax\(\w+, \('model',\)\)\)"
VARIES = rf"varies over the mesh axes \('model',\).* {MAXIMUM}"
REJECTED = {
    "unknown axis": (
        lambda tree: global_norm(tree, axis_name="dta"),
        r"got 'dta' \(str\). The mesh axes mapped here are \('data', 'model'\)",
    ),
    "another tree": (
        lambda tree: global_norm(tree, axis_name={"both": P("data"), "hole": P()}),
        "`axis_name` must be a prefix of .* Missing: .*'whole'.* Unexpected: 'hole'",
    ),
    "long spec": (
        lambda tree: clip_by_norm(tree, 1.0, axis_name=P("data", None, "model")),
        "at most one entry per dimension of a leaf, got 3 in",
    ),
    "unconstrained spec": (
        lambda tree: clip_by_norm(tree, 1.0, axis_name=P(P.UNCONSTRAINED)),
        "UNCONSTRAINED, which does not specify",
    ),
    "undeclared slices": (
        lambda tree: clip_by_norm(tree, 1.0, axis=0),
        "does not specify the split dimension",
    ),
    "threshold of the tree": (
        lambda tree: clip_by_global_norm(tree, by_device()),
        VARIES,
    ),
    "threshold of leaves": (lambda tree: clip_by_norm(tree, by_device()), VARIES),
    "threshold of elements": (
        lambda tree: clip_by_value(tree, lower=-1.0, upper=by_device()),
        VARIES,
    ),
    "eps": (
        lambda tree: clip_by_global_norm(tree, 1.0, eps=by_device()),
        rf"`eps` {VARIES}",
    ),
    "state of whole leaves": (
        lambda tree: ROWS.update(tree, ROWS.init(TREE)),
        "its own memory in the state, .* Call init inside the same shard_map",
    ),
    "norm of the user": (
        lambda tree: PASSED.update(tree, PASSED.init(tree), grad_norm=by_device())[0],
        rf"`grad_norm` {VARIES}",
    ),
}


CALLS = {
    "untyped": (mapped(global_norm, check_vma=False), UNTYPED),
    "pmap": (jax.pmap(global_norm), "Inside pmap, or shard_map with"),
} | {name: (mapped(function), words) for name, (function, words) in REJECTED.items()}


@pytest.mark.parametrize("case", CALLS)
def test_mapped_call_ambiguous_over_devices_raises(case):
    call, words = CALLS[case]
    with pytest.raises(ValueError, match=words):
        call({"both": TREE["both"][:, :1]} if case == "pmap" else TREE)


def test_clip_unreduced_gradient_raises():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    x = np.ones((8, 4), np.float32)

    def clip(x):
        gradient = jnp.einsum("bi,bj->ij", x, x, out_sharding=P(unreduced={"data"}))
        return clip_by_global_norm({"kernel": gradient}, 1.0)

    with jax.set_mesh(mesh):
        x = jax.device_put(x, NamedSharding(mesh, P("data")))
        with pytest.raises(ValueError, match=r"'kernel' is unreduced .*'data'"):
            jax.eval_shape(clip, x)
