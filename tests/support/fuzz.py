"""What a fuzzer gives to every public function: hostile trees, thresholds, options.

Three in four draws of an argument are such as are accepted, so that a fair share of the
calls succeed and their answers can be looked at. Shapes and structures are few, because
each new one has to be compiled.
"""

import decimal
import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from hypothesis import strategies as st

import optclip
from optclip import functional, recipes, thresholds


class Point(NamedTuple):
    """A container that JAX takes apart, and no dict or list."""

    x: Any
    y: Any


class Stranger:
    """Nothing that anybody could clip, or clip at."""

    def __repr__(self) -> str:
        return "Stranger()"


def _mostly(right: list[Any], wrong: list[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(*[st.sampled_from(right)] * 3, st.sampled_from(wrong))


SHAPES = [(), (3,), (2, 3), (0,), (1, 1, 2)]
DTYPES = ["float32", "bfloat16", "float16"]
SPECIAL = [math.nan, math.inf, -math.inf]


@st.composite
def arrays(
    draw: Callable[..., Any], of_jax: bool = False, shapes: Any = SHAPES
) -> np.ndarray | jax.Array:
    """Around a power of two; zeros, largest numbers, NaN and inf among them."""
    dtype, shape = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(shapes))
    info = jnp.finfo(dtype)
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    center = draw(st.sampled_from([0, 0, 0, info.minexp + 4, info.maxexp - 3, 9]))
    x = np.ldexp(rng.normal(size=shape), center).clip(float(info.min), float(info.max))
    pattern = draw(st.sampled_from(["plain", "plain", "zeros", "largest", "special"]))
    if pattern == "zeros":
        x = x * 0.0
    if pattern == "largest":
        x = np.full(shape, float(info.max))
    if pattern == "special" and x.size:
        x.flat[0] = draw(st.sampled_from(SPECIAL))
    kind = (
        st.just(jnp.asarray) if of_jax else st.sampled_from([np.asarray, jnp.asarray])
    )
    return draw(kind)(x.astype(dtype))


PASSING = [
    None, 3, True, np.arange(3), jnp.array([True]), jax.random.key(0), np.ones((), bool),
]  # fmt: skip
NUMBERS = [1.5, -2.0, 0.0, 1j, np.float32(3.0), np.ones(2, np.complex64)]
HOSTILE = ["text", Stranger(), b"bytes", np.array(["a"]), np.array([None]), {1, 2}, len]


def leaves() -> st.SearchStrategy[Any]:
    return st.one_of(*[arrays()] * 8, _mostly(NUMBERS + PASSING, HOSTILE))


def trees(leaf: st.SearchStrategy[Any] | None = None) -> st.SearchStrategy[Any]:
    x = leaves() if leaf is None else leaf
    return st.one_of(
        x,
        st.tuples(x, x),
        st.builds(lambda a, b, c: {"a": a, "b": [b, c]}, x, x, x),
        st.builds(lambda a, b, c: {"a": {"w": a, "b": b}, "b": c}, x, x, x),
        st.builds(lambda a, b: {"p": Point(a, (b, {})), "n": None}, x, x),
        st.sampled_from([{}, [], None, (), {"a": {}}]),
    )


LIMITS = [
    1.0, 0.5, 2, 0.0, 1e-30, 1e30, math.inf, np.float32(0.25), jnp.float32(3.0),
    np.float16(0.5), {"a": 1.0, "b": 2.0}, (1.0, None), lambda step: 1.0 / (step + 1),
    optax.linear_schedule(1.0, 0.1, 5), thresholds.quantile(0.5, 4), None,
    thresholds.ema(max_norm=1.0), thresholds.bounds(-1.0, 2.0), np.ones(3),
]  # fmt: skip
BAD_LIMITS = [
    -1.0, math.nan, -math.inf, True, "x", 1j, 10**400, Stranger(), np.full(3, -1.0),
    np.ones((2, 3)), np.ones((7, 7)), [], {}, {"a": "x"}, {"c": 1.0}, [1.0, "x", 2.0],
    lambda step: "x", lambda: 1.0, lambda step: np.ones(9), lambda step: None,
    decimal.Decimal(1), b"1", jax.random.key(0), thresholds.ema, {"a": {"b": {}}},
    np.array("2020-01-01", np.datetime64), np.zeros(0), range(3), jnp.arange(2),
]  # fmt: skip
limits = _mostly(LIMITS, BAD_LIMITS)

# Labels that fit every tree: all leaves in one group, each in its own.
TOGETHER = optclip.by_path(lambda path: "all")
APART = optclip.by_path(str)
MASKS = [
    True, False, {"a": True, "b": False}, (True, False), lambda tree: True,
    optclip.by_path(lambda path: "a" in path),
]  # fmt: skip
BAD_MASKS = ["x", 3, Stranger(), {"c": True}, lambda: True, lambda tree: "x", [None]]
OPTIONS: dict[str, st.SearchStrategy[Any]] = {
    "ord": _mostly([None, 1, 2.0, math.inf, 0.5, 3], [0, -1, math.nan, "x", True, [2]]),
    "axis": _mostly([None, 0, -1, (0,)], [5, "x", (0, 0), 1.5, (), True, [0]]),
    "eps": _mostly([0.0, 1e-6, 1], [-1.0, math.nan, "x", math.inf, None, np.ones(2)]),
    "strict": _mostly([True, False], ["x", None, 1]),
    "nonfinite": _mostly(["propagate", "zero", "drop"], ["raise", "nan", None, 3]),
    "response": _mostly(
        ["hard", "smooth", "normalize", "tanh", "drop", optclip.responses.band(0.5)],
        [
            "x",
            None,
            3,
            lambda n: n,
            lambda n, c: "x",
            lambda n, c: np.ones(7),
            Stranger(),
        ],
    ),
    "mask": _mostly(MASKS, BAD_MASKS),
    "norm_mask": _mostly(MASKS, BAD_MASKS),
    "clip_mask": _mostly(MASKS, BAD_MASKS),
    "axis_name": _mostly([None, ()], ["data", 3, ("x", "y"), {"a": "x"}, Stranger()]),
    "record": _mostly([True, False, "leaves"], ["x", None, 3]),
    "name": _mostly(["clip", "other"], ["", None, 3]),
    "over": _mostly(
        ["tree", "leaf", "element", optclip.axes(0), optclip.units()],
        ["tree", None, optclip.axes(7), optclip.groups(lambda tree: 3), Stranger()],
    ),
    "norm": _mostly(["l1", "rms"], [-2, "x", None, Stranger()]),
    "groups": _mostly(
        [{"a": "x", "b": "y"}, TOGETHER, APART],
        [
            3,
            ("x", None),
            lambda tree: "x",
            None,
            {"c": "x"},
            {"a": 1, "b": 2},
            lambda: "x",
            Stranger(),
        ],
    ),
    "lower": _mostly([-1.0, None, -math.inf, 0], [3.0, math.nan, "x", {"c": 1}]),
    "upper": _mostly([1.0, None, math.inf, 0], [-3.0, math.nan, "x", {"c": 1}]),
}
# Numbers for whatever rules and recipes ask.
ARGUMENTS = _mostly(
    [0.5, 0.9, 1.0, 2, 5, 100, 0.01],
    [-1, 0, math.nan, math.inf, "x", None, True, np.ones(2), 10**400, Stranger(), 1j],
)

# Attention has arguments, and formulas, of its own.
FUNCTIONS = {
    name: getattr(functional, name)
    for name in functional.__all__
    if "attention" not in name
}
FACTORIES = {
    name: getattr(optclip, name)
    for name in optclip.__all__
    if name.startswith("clip_by")
}
RECIPES = {name: getattr(recipes, name) for name in recipes.__all__}
# Not for every scope, or of one argument that is a function.
NO_RULES = ("bounds", "constant", "schedule", "of_gradients")
RULES = {
    name: getattr(thresholds, name)
    for name in thresholds.__all__
    if name[0].islower() and name not in NO_RULES
}


@st.composite
def options_of(draw, function):
    """At most three of its options."""
    taken = set(inspect.signature(function).parameters)
    names = sorted((taken & set(OPTIONS)) - {"groups", "lower", "upper"})
    some = draw(st.lists(st.sampled_from(names), max_size=3, unique=True))
    return {name: draw(OPTIONS[name]) for name in some}


@st.composite
def clips(draw, functions):
    """One of them by name, what follows the tree, options."""
    name = draw(st.sampled_from(sorted(functions)))
    options = draw(options_of(functions[name]))
    if name == "global_norm":
        return name, (), options
    if name == "clip_by_value" and functions is FUNCTIONS:
        sides = {side: draw(OPTIONS[side]) for side in ("lower", "upper")}
        return name, (), options | sides
    last = (draw(OPTIONS["groups"]),) if name == "clip_by_group_norm" else ()
    return name, (draw(limits), *last), options


@st.composite
def made(draw, functions, others):
    """A rule or recipe by name, some of its arguments hostile."""
    name = draw(st.sampled_from(sorted(functions)))
    parameters = sorted(set(inspect.signature(functions[name]).parameters) - others)
    if not parameters:
        return name, {}
    some = draw(st.lists(st.sampled_from(parameters), max_size=2, unique=True))
    return name, {each: draw(ARGUMENTS) for each in some}


STEPS = [1.0, 2.5, 0.0, math.nan, math.inf, 1e-30, 3]
COLUMN = st.lists(st.sampled_from(STEPS), min_size=0, max_size=30)
COMPLETE = ["norm", "threshold", "coefficient"]
FIELDS = [*COMPLETE, "rate", "clipped", "norm/a", "norm/b"]


@st.composite
def histories(draw):
    """Lists of dicts, dicts of lists, and what is neither."""
    some = draw(st.lists(st.sampled_from(FIELDS), max_size=5, unique=True))
    fields = draw(st.sampled_from([some, COMPLETE, [*COMPLETE, "rate"]]))
    name = draw(st.sampled_from(["clip", "other", ""]))
    count = draw(st.sampled_from([0, 1, 20, 30]))
    columns = {f"{name}/{x}": draw(COLUMN) for x in fields}
    if draw(st.sampled_from([True, True, False])):
        columns = {k: np.resize(v or [1.0], count) for k, v in columns.items()}
    rows = [{k: v[i] for k, v in columns.items() if i < len(v)} for i in range(count)]
    hostile = [3, None, {"clip/norm": "x"}, [{"clip/norm": None}], [3], [[]]]
    return draw(
        st.one_of(*[st.sampled_from([columns, rows])] * 4, st.sampled_from(hostile))
    )
