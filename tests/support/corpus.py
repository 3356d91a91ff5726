"""Named trees that clips get wrong: magnitudes, ties, kinds of leaves, splits.

Every tree is a dict with the keys `dense` and `out`, all leaves have an axis, and
`scale` says at what multiple of its threshold a clip is put to the test.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.support.helpers import DTYPES


@dataclasses.dataclass(frozen=True)
class Tree:
    name: str
    make: Callable[[], Any]
    scale: float = 1.0


def _normals(seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "dense": {"bias": rng.normal(size=4), "kernel": rng.normal(size=(3, 4))},
        "out": [rng.normal(size=(2, 4))],
    }


def _mapped(function: Callable[[np.ndarray], np.ndarray], seed: int = 0) -> Any:
    return jax.tree.map(function, _normals(seed))


def _leafwise(*values: Any) -> Any:
    """One value, or one array that is repeated to fill, for each of the three leaves."""
    treedef = jax.tree.structure(_normals())
    shapes = [leaf.shape for leaf in jax.tree.leaves(_normals())]
    filled = [np.resize(v, shape) for v, shape in zip(values, shapes, strict=True)]
    return jax.tree.unflatten(treedef, filled)


def _one_of(x: np.ndarray, value: float) -> np.ndarray:
    out = np.zeros_like(x)
    out.flat[-1] = value
    return out


def _spread(x: np.ndarray, factor: float) -> np.ndarray:
    """The first elements times factor, the second over it, and so on."""
    powers = np.resize([1.0, -1.0, 0.0], x.size).reshape(x.shape)
    return x * factor**powers


# By the largest number whose norms are in range, one whose resolution is a norm still,
# and the resolution of the dtype.
Maker = Callable[[float, float, float], tuple[Any, float]]
PATTERNS: dict[str, Maker] = {
    "zeros": lambda top, low, eps: (_mapped(np.zeros_like), 1.0),
    "negative zeros": lambda top, low, eps: (_mapped(lambda x: x * 0 - 0.0), 1.0),
    "one element": lambda top, low, eps: (_mapped(lambda x: _one_of(x, 300.0)), 1.0),
    "one leaf": lambda top, low, eps: (_leafwise(0.0, 0.0, [3.0, -4.0]), 1.0),
    "equal": lambda top, low, eps: (_mapped(lambda x: x * 0 + 0.7), 1.0),
    "alternating": lambda top, low, eps: (_leafwise(*[[1.0, -1.0]] * 3), 1.0),
    "largest": lambda top, low, eps: (_leafwise(top, -top, top), 1.0),
    "largest, large threshold": lambda top, low, eps: (
        _leafwise(top, -top, top),
        top / 8,
    ),
    "largest, least threshold": lambda top, low, eps: (
        _leafwise(top, -top, top),
        max(low, top * 2.0**-126) * 64,
    ),
    "large": lambda top, low, eps: (_mapped(lambda x: x * (top / 64)), top / 64),
    "squares just overflow": lambda top, low, eps: (
        _mapped(lambda x: x * 4 * top**0.5),
        top**0.5,
    ),
    "squares just fit": lambda top, low, eps: (
        _mapped(lambda x: x * top**0.5 / 64),
        1.0,
    ),
    "squares just vanish": lambda top, low, eps: (
        _mapped(lambda x: x * low**0.5 / 4),
        low**0.5 / 4,
    ),
    "small": lambda top, low, eps: (_mapped(lambda x: x * low * 256), low * 256),
    "smallest normals": lambda top, low, eps: (_leafwise(low, -low, low), low * 0.75),
    "subnormals": lambda top, low, eps: (_mapped(lambda x: x * low * 4 * eps), low),
    "apart within leaves": lambda top, low, eps: (
        _mapped(lambda x: _spread(x, min(top, 1e30) ** 0.5 / 16)),
        1.0,
    ),
    "apart between leaves": lambda top, low, eps: (
        _leafwise(low * 8, 1.0, min(top / 32, 2.0**25)),
        1.0,
    ),
    "large and zeros": lambda top, low, eps: (_leafwise(top, 0.0, 0.0), 1.0),
    "exactly at": lambda top, low, eps: (_leafwise([2.0, 0, 0, 0], 0.0, 0.0), 1.0),
    "just above": lambda top, low, eps: (
        _leafwise([2.0 * (1 + eps), 0, 0, 0], 0.0, [0.5 + eps]),
        1.0,
    ),
    "just below": lambda top, low, eps: (
        _leafwise([2.0 * (1 - eps), 0, 0, 0], 0.0, [0.5 - eps]),
        1.0,
    ),
    "integers": lambda top, low, eps: (_mapped(lambda x: np.round(x * 90)), 7.0),
    "powers of two": lambda top, low, eps: (_mapped(lambda x: np.exp2(x // 0.3)), 1.0),
    "heavy tails": lambda top, low, eps: (_mapped(lambda x: x**7), 1.0),
    "ascending": lambda top, low, eps: (_mapped(lambda x: np.sort(x.ravel()) + 2), 1.0),
}


def _of_dtype(maker: Maker, dtype: str) -> tuple[Any, float]:
    info = jnp.finfo(dtype)
    top, low = float(info.max), float(info.tiny)
    if info.maxexp == jnp.finfo("float32").maxexp:
        top, low = top / 32, 2.0**-30
    values, scale = maker(top, low, float(info.eps))
    shaped = jax.tree.map(lambda x, like: x.reshape(like.shape), values, _normals())
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), shaped), scale


def _f32(*shape: int, seed: int = 1) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


STRUCTURES: dict[str, Callable[[], Any]] = {
    "nothing": lambda: {"dense": {}, "out": []},
    "None everywhere": lambda: {"dense": None, "out": [None, _f32(3, 4)]},
    "empty leaves": lambda: {"dense": jnp.zeros((0, 4)), "out": _f32(2, 4)},
    "single elements": lambda: {"dense": [_f32(1)] * 5, "out": -_f32(1, 1, 1)},
    "100 leaves": lambda: {
        "dense": [_f32(2, seed=k) for k in range(99)],
        "out": _f32(3),
    },
    "many axes": lambda: {"dense": _f32(2, 1, 3, 1, 2, 2), "out": _f32(1, 5)},
    "30 x 50": lambda: {"dense": jnp.full((30, 50), 0.1), "out": _f32(50)},
    "5,000 elements": lambda: {"dense": _f32(5000), "out": jnp.full(5000, 1e-4)},
    "deep": lambda: {"dense": [[[[{"a": _f32(4)}]]]], "out": ((_f32(2),), {})},
    "integers beside": lambda: {"dense": jnp.arange(5), "out": [_f32(4), True, 7]},
    "three dtypes": lambda: {
        "dense": [jnp.full(3, 300, jnp.float16), jnp.full(3, 1e30, jnp.bfloat16)],
        "out": jnp.full((2, 2), 1e-12),
    },
    "half beside full": lambda: {
        "dense": jnp.full(3, 6e-8, jnp.float16),
        "out": _f32(9),
    },
    "eight bits": lambda: {
        "dense": jnp.asarray(_f32(3, 4) * 16, jnp.float8_e4m3fn),
        "out": jnp.asarray(_f32(6) * 4096, jnp.float8_e5m2),
    },
}


def patterns(dtype: str) -> Iterator[Tree]:
    """Trees of the same shapes, so that one program takes them all."""
    for name, maker in PATTERNS.items():
        tree, scale = _of_dtype(maker, dtype)
        yield Tree(f"{name}, {dtype}", lambda tree=tree: tree, scale)


def structures(name: str) -> Iterator[Tree]:
    yield Tree(name, STRUCTURES[name])


def corpus() -> Iterator[Tree]:
    for dtype in DTYPES:
        yield from patterns(dtype)
    for name in STRUCTURES:
        yield from structures(name)
