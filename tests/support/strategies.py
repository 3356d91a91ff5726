"""Define Hypothesis strategies of hostile trees, thresholds and options.

Three in four drawn arguments are valid, so that many calls succeed and their results
can be checked. Shapes and structures are few, because each one is compiled.
"""

import inspect
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

import optclip
from optclip import _thresholds, functional, thresholds


class Range(NamedTuple):
    """Hold the largest number with a finite norm, the smallest normal one and eps."""

    top: float
    low: float
    eps: float


def _one(_):
    return 1.0


# Functions from normal samples, the index of a leaf and the dtype's range to the leaf,
# and from the range to the factor of the threshold.
PATTERNS = {
    "zeros": (lambda x, i, r: 0.0, _one),
    "negative zeros": (lambda x, i, r: -0.0, _one),
    "one element": (lambda x, i, r: np.where(x == x.max(), 300.0, 0.0), _one),
    "one leaf": (lambda x, i, r: [3.0 * (i == 2), -4.0 * (i == 2)], _one),
    "equal": (lambda x, i, r: 0.7, _one),
    "alternating": (lambda x, i, r: [1.0, -1.0], _one),
    "largest": (lambda x, i, r: r.top * (-1) ** i, _one),
    "largest, large threshold": (lambda x, i, r: r.top, lambda r: r.top / 8),
    "largest, least threshold": (
        lambda x, i, r: r.top,
        lambda r: max(r.low, r.top * 2.0**-126) * 64,
    ),
    "large": (lambda x, i, r: x * r.top / 64, lambda r: r.top / 64),
    "squares just overflow": (lambda x, i, r: x * 4 * r.top**0.5, lambda r: r.top**0.5),
    "squares just fit": (lambda x, i, r: x * r.top**0.5 / 64, _one),
    "squares just vanish": (
        lambda x, i, r: x * r.low**0.5 / 4,
        lambda r: r.low**0.5 / 4,
    ),
    "small": (lambda x, i, r: x * r.low * 256, lambda r: r.low * 256),
    "smallest normals": (lambda x, i, r: r.low * (-1) ** i, lambda r: r.low * 0.75),
    "subnormals": (lambda x, i, r: x * r.low * 4 * r.eps, lambda r: r.low),
    "apart within leaves": (
        lambda x, i, r: x * (min(r.top, 1e30) ** 0.5 / 16) ** np.sign(x[::-1]),
        _one,
    ),
    "apart between leaves": (
        lambda x, i, r: [r.low * 8, 1.0, min(r.top / 32, 2.0**25)][i],
        _one,
    ),
    "large and zeros": (lambda x, i, r: r.top * (i == 0), _one),
    "exactly at": (lambda x, i, r: [2.0 * (i == 0), 0, 0, 0], _one),
    "just above": (
        lambda x, i, r: [[2 * (1 + r.eps), 0, 0, 0], 0.0, 0.5 + r.eps][i],
        _one,
    ),
    "just below": (
        lambda x, i, r: [[2 * (1 - r.eps), 0, 0, 0], 0.0, 0.5 - r.eps][i],
        _one,
    ),
    "integers": (lambda x, i, r: np.round(x * 90), lambda r: 7.0),
    "powers of two": (lambda x, i, r: np.exp2(x // 0.3), _one),
    "heavy tails": (lambda x, i, r: x**7, _one),
    "ascending": (lambda x, i, r: np.sort(x, axis=None) + 2, _one),
}
LEAVES = {"dense": {"bias": (4,), "kernel": (3, 4)}, "out": [(2, 4)]}


def _leaf(*shape, seed=1):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def tree_like(leaf):
    """Build the tree of `LEAVES`, each leaf from its index and shape."""
    shapes, treedef = jax.tree.flatten(LEAVES, is_leaf=lambda x: isinstance(x, tuple))
    return treedef.unflatten([leaf(i, shape) for i, shape in enumerate(shapes)])


def pattern(name, dtype):
    """Return a tree of hostile magnitudes, and the factor of the threshold."""
    info = jnp.finfo(dtype)
    span = Range(float(info.max), float(info.tiny), float(info.eps))
    if dtype != "float16":
        span = Range(span.top / 32, 2.0**-30, span.eps)
    values, scale = PATTERNS[name]

    def leaf(i, shape):
        x = np.asarray(values(_leaf(*shape, seed=i).astype(float), i, span))
        return np.resize(x, shape).astype(info.dtype)

    return tree_like(leaf), scale(span)


@st.composite
def finite_trees(draw, dtype, lowest=None):
    """Draw leaves around a power of two, with zeros and other magnitudes."""
    info = jnp.finfo(dtype)
    lowest = max(info.minexp + 20, -40) if lowest is None else lowest
    center = draw(st.integers(lowest, min(info.maxexp - 2, 100)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    zeros = draw(st.sampled_from([0.0, 0.0, 0.5, 0.95]))
    spread = draw(st.sampled_from([0, 0, 3, 10]))
    is_equal = draw(st.booleans())
    largest = float(info.max) / 2

    def leaf(_, shape):
        x = np.ones(shape) if is_equal else rng.normal(size=shape)
        x = np.ldexp(x, center + rng.integers(-spread, 1, size=shape))
        x = np.where(rng.random(shape) < zeros, 0.0, x)
        return np.clip(x, -largest, largest).astype(info.dtype)

    return tree_like(leaf)


class Point(NamedTuple):
    """Stand for containers that are neither dicts nor lists."""

    x: object
    y: object


class Stranger:
    """Stand for objects that no argument accepts."""

    def __repr__(self):
        return "Stranger()"


def mostly(right, wrong):
    return st.one_of(*[st.sampled_from(right)] * 3, st.sampled_from(wrong))


@st.composite
def arrays(draw):
    """Draw arrays around a power of two, with zeros, largest numbers, NaN and inf."""
    info = jnp.finfo(draw(st.sampled_from(["float32", "float16"])))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    center = draw(st.sampled_from([0, 0, 0, info.minexp + 4, info.maxexp - 3, 9]))
    shape = draw(st.sampled_from([(2, 3), (), (0,)]))
    x = np.ldexp(rng.normal(size=shape), center).clip(float(info.min), float(info.max))
    kind = draw(st.sampled_from(["plain", "plain", "zeros", "largest", "special"]))
    x = {"zeros": x * 0.0, "largest": np.full(shape, float(info.max))}.get(kind, x)
    if kind == "special" and x.size:
        x.flat[0] = draw(st.sampled_from([math.nan, math.inf, -math.inf]))
    return draw(st.sampled_from([np.asarray, jnp.asarray]))(x.astype(info.dtype))


def trees(x):
    return st.one_of(
        x,
        st.builds(lambda a, b, c: {"a": a, "b": [b, c]}, x, x, x),
        st.builds(lambda a, b: {"a": {"w": a, "n": None}, "b": Point(b, {})}, x, x),
        st.sampled_from([{}, None, {"a": {}}]),
    )


PASSING = [None, 3, np.arange(3), jnp.array([True]), jax.random.key(0), 1.5, -2.0]
HOSTILE = ["text", Stranger(), b"bytes", np.array(["a"]), np.array([None]), {1, 2}, len]
ANYTHING = trees(st.one_of(*[arrays()] * 8, mostly(PASSING, HOSTILE)))
LIMITS = mostly(
    [
        *(1.0, 0.5, 2, 0.0, 1e-30, 1e30, math.inf, np.float32(0.25), jnp.float32(3.0)),
        *(lambda step: 1.0 / (step + 1), {"a": 1.0, "b": 2.0}, None),
        *(thresholds.quantile(0.5, 4), _thresholds.bounds(-1.0, 2.0)),
    ],
    [
        *(-1.0, math.nan, -math.inf, True, "x", 1j, 10**400, Stranger(), np.zeros(0)),
        *([], {}, {"a": "x"}, {"c": 1.0}, np.ones((7, 7)), np.array(["a"]), range(3)),
        *(lambda step: "x", lambda: 1.0, lambda step: np.ones(9), thresholds.ema),
    ],
)
# Labels for every tree: all leaves in one group, or each in its own.
TOGETHER = optclip.by_path(lambda path: "all")
APART = optclip.by_path(str)
MASKS = mostly(
    [True, False, {"a": True, "b": False}, lambda tree: True],
    ["x", 3, Stranger(), {"c": True}, lambda: True, lambda tree: "x", [None]],
)
LOWER = mostly([-1.0, None, -math.inf, 0], [3.0, math.nan, "x", {"c": 1}])
UPPER = mostly([1.0, None, math.inf, 0], [-3.0, math.nan, "x", {"c": 1}])
GROUPS = mostly(
    [{"a": "x", "b": "y"}, TOGETHER, APART],
    [3, None, ("x", None), {"c": "x"}, {"a": 1, "b": 2}, lambda: "x", Stranger()],
)
OPTIONS = {
    "ord": mostly([None, 1, 2.0, math.inf, 3], [0, -1, math.nan, "x", True, [2]]),
    "axis": mostly([None, 0, -1, (0,)], [5, "x", (0, 0), 1.5, (), True, [0]]),
    "eps": mostly([0.0, 1e-6, 1], [-1.0, math.nan, "x", math.inf, None, np.ones(2)]),
    "strict": mostly([True, False], ["x", None, 1]),
    "nonfinite": mostly(["propagate", "zero"], ["raise", "drop", None, 3]),
    "response": mostly(
        ["hard", "smooth", "normalize", "tanh", optclip.responses.band(0.5)],
        ["x", None, 3, lambda n: n, lambda n, c: "x", lambda n, c: np.ones(7)],
    ),
    "mask": MASKS,
    "norm_mask": MASKS,
    "clip_mask": MASKS,
    "axis_name": mostly([None, ()], ["data", 3, ("x", "y"), {"a": "x"}, Stranger()]),
    "record": mostly([True, False, "leaves"], ["x", None, 3]),
    "name": mostly(["clip", "other"], ["", None, 3]),
    "over": mostly(
        ["tree", "leaf", "element", optclip.axes(0), optclip.units()],
        [None, optclip.axes(7), optclip.groups(lambda tree: 3), Stranger()],
    ),
    "norm": mostly(["l1", "rms"], [-2, "x", None, Stranger()]),
}
PURE = {f"functional.{name}": getattr(functional, name) for name in functional.__all__}
CLIPS = {
    name: function
    for name, function in (vars(optclip) | PURE).items()
    if "clip_by" in name
}
WITH_NORMS = {
    f"functional.{name}"
    for name in ("clip_by", "clip_by_global_norm", "clip_by_group_norm")
}


@st.composite
def clips(draw):
    """Draw a clipping function by name, its arguments and at most three options."""
    name = draw(st.sampled_from(sorted(CLIPS)))
    accepted = set(inspect.signature(CLIPS[name]).parameters)
    names = st.sampled_from(sorted(accepted & set(OPTIONS)))
    chosen = draw(st.lists(names, max_size=3, unique=True))
    options = {option: draw(OPTIONS[option]) for option in chosen}
    if name == "functional.clip_by_value":
        return name, (), options | {"lower": draw(LOWER), "upper": draw(UPPER)}
    grouped = (draw(GROUPS),) if name.endswith("clip_by_group_norm") else ()
    return name, (draw(LIMITS), *grouped), options
