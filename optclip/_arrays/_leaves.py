"""Define leaves: which are clipped, under which path, in which precision."""

from __future__ import annotations

import dataclasses
import math
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from . import _validate
from ._types import KeyPath, LeafLike, PyTree, TreeDef

if TYPE_CHECKING:
    from jax.experimental.sparse import BCOO

# Exponent-only formats hold scales, not gradients: they have no zero and no sign.
_SCALE_FORMATS = ("float8_e8m0fnu",)


class MarkKey(NamedTuple):
    """The key below a leaf that `carry_over` marks. It is no part of a name."""

    number: int


# The key of the array in the box in which Flax keeps a parameter.
IN_BOX = jax.tree_util.GetAttrKey("value")

_REMOVE = "Remove it, or filter it out with optax.masked or equinox.filter."


@dataclasses.dataclass(frozen=True)
class Flat:
    """Hold a flattened pytree, with sparse matrices as leaves."""

    tree: PyTree
    paths: list[KeyPath]
    leaves: list[LeafLike]
    treedef: TreeDef

    def rebuild(self, leaves: list[LeafLike]) -> PyTree:
        return jax.tree.unflatten(self.treedef, leaves)

    def clippable(self) -> list[bool]:
        return [*map(is_clippable, self.paths, self.leaves)]


def is_sparse(leaf: LeafLike) -> bool:
    """Return whether a leaf is a sparse matrix of JAX, of any format."""
    return _is_of_format("JAXSparse", leaf)


def _is_of_format(name: str, leaf: LeafLike) -> bool:
    # Importing it would be slower than all of optclip, and any caller with a sparse
    # matrix has imported it.
    sparse = sys.modules.get("jax.experimental.sparse")
    return sparse is not None and isinstance(leaf, getattr(sparse, name, ()))


def check_format(path: KeyPath, leaf: LeafLike) -> None:
    """Raise if a leaf is a sparse matrix of another format than BCOO.

    JAX registers them as pytrees of numbers and indices, which would be measured apart.
    """
    if not is_sparse(leaf) or _is_of_format("BCOO", leaf):
        return
    # COO, CSR and CSC have no `to_bcoo`.
    advice = "Convert it with BCOO.fromdense(matrix.todense(), nse=matrix.nse)."
    if hasattr(leaf, "to_bcoo"):
        advice = "Convert it with its .to_bcoo()."
    raise TypeError(
        _validate.must_be(
            named(path, "The"), "a dense array or a BCOO matrix", leaf, advice
        )
    )


def flatten(tree: PyTree) -> Flat:
    pairs, treedef = jax.tree.flatten_with_path(tree, is_leaf=is_sparse)
    return Flat(tree, [path for path, _ in pairs], [x for _, x in pairs], treedef)


def unmarked(path: KeyPath) -> KeyPath:
    """Return a path without the keys of marks."""
    return tuple(key for key in path if not isinstance(key, MarkKey))


def path_str(path: KeyPath) -> str:
    """Return the path of a leaf as users type it, ``encoder/0/kernel``."""
    return jax.tree_util.keystr(unmarked(path), simple=True, separator="/")


def named(path: KeyPath, article: str = "the") -> str:
    """Return the name of a leaf in an error: "the leaf 'head/bias'" or "the array"."""
    return f"{article} leaf '{path_str(path)}'" if path else f"{article} array"


def names_of(paths: list[KeyPath]) -> list[str]:
    """Return the paths as strings, without the keys that only unwrap one array."""
    return [path_str(path) for path in _unboxed(paths)]


def keys_of(paths: list[KeyPath]) -> list[tuple[str, ...]]:
    """Return the texts of the keys of each path, without those that only unwrap one."""
    return [tuple(path_str((key,)) for key in path) for path in _unboxed(paths)]


def _unboxed(paths: list[KeyPath]) -> list[KeyPath]:
    """Return the paths without the keys that only unwrap one array.

    Flax's optimizer has boxed parameters at `init` and bare ones at `update`, and both
    must have one name. The array of a haliax `NamedArray` has a position for a key.
    """
    paths = [unmarked(path) for path in paths]
    if not any(_may_unwrap(key) for path in paths for key in path):
        return paths
    children: dict[KeyPath, set[Any]] = {}
    for path in paths:
        for i, key in enumerate(path):
            children.setdefault(path[:i], set()).add(key)

    def unwraps(path: KeyPath, i: int) -> bool:
        is_inner_box = path[i] == IN_BOX and i < len(path) - 1
        is_only_child = len(children[path[:i]]) == 1
        return is_only_child and _may_unwrap(path[i]) and not is_inner_box

    return [
        tuple(key for i, key in enumerate(path) if not unwraps(path, i))
        for path in paths
    ]


def _may_unwrap(key: Any) -> bool:
    """Return whether a key can belong to the one array in a box or a keyless node."""
    # JAX numbers the children of nodes that are registered without keys.
    return key in (IN_BOX, jax.tree_util.FlattenedIndexKey(0))


def flatten_dense(tree: PyTree, reason: str) -> Flat:
    """Flatten a tree; raise with a reason if one of its leaves is sparse."""
    flat = flatten(tree)
    for path, leaf in zip(flat.paths, flat.leaves, strict=True):
        check_format(path, leaf)
        if is_sparse(leaf):
            raise TypeError(
                f"{named(path, 'The')} must be dense, got a BCOO matrix, {reason}. Pass"
                " its todense(), or exclude it with optax.masked."
            )
    return flat


def check_is_ours(path: KeyPath, leaf: LeafLike) -> None:
    """Raise if a leaf is a tensor of another library."""
    if _validate.is_foreign(leaf):
        raise TypeError(
            _validate.must_be(named(path, "The"), "a JAX or NumPy array", leaf)
        )


def is_clippable(path: KeyPath, leaf: LeafLike) -> bool:
    """Return whether a leaf is clipped; integers, bools, float0 and PRNG keys are not.

    Raises:
      TypeError: The leaf is not an array or a number; the message names its path.
    """
    if is_sparse(leaf):
        check_format(path, leaf)
        _check_batches(path, leaf)
        return is_clippable(path, leaf.data)
    if isinstance(leaf, (bool, int, float, complex)):
        return isinstance(leaf, (float, complex))
    dtype = getattr(leaf, "dtype", None)
    check_is_ours(path, leaf)
    if dtype is None or not hasattr(leaf, "shape"):
        wanted = "an array, a number, a BCOO matrix or None"
        subject = named(path, "The") if path else "The tree"
        raise TypeError(_validate.must_be(subject, wanted, leaf, _REMOVE))
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.dtype(dtype).name not in _SCALE_FORMATS
    is_kept = (jnp.issubdtype(dtype, x) for x in (jnp.integer, jax.dtypes.prng_key))
    if dtype in (np.bool_, jax.dtypes.float0) or any(is_kept):
        return False
    raise TypeError(
        f"{named(path, 'The')} must be floating-point or complex, which is clipped, or"
        f" integer or bool, which is returned unchanged, got {dtype}. {_REMOVE}"
    )


def is_floating(x: Any) -> bool:
    """Return whether `x` is a real or complex floating-point array or number."""
    if isinstance(x, (float, complex)):
        return True
    return jnp.issubdtype(getattr(x, "dtype", jnp.int32), jnp.inexact)


def are_floating(tree: PyTree) -> PyTree:
    """Return a mask for optax optimizers, which convert integers to floats."""
    return jax.tree.map(is_floating, tree)


def _check_batches(path: KeyPath, mat: BCOO) -> None:
    """Raise if one stored batch serves several, which could be clipped differently."""
    batch = mat.shape[: mat.n_batch]
    stored = zip(mat.data.shape, mat.indices.shape, batch, strict=False)
    if any(data == index == 1 < size for data, index, size in stored):
        raise ValueError(
            f"{named(path, 'The')} is a BCOO matrix of shape {mat.shape} that stores"
            " one batch for several. Expand the batch axes of its data or indices with"
            " jnp.broadcast_to."
        )


def values(leaf: LeafLike) -> jax.Array:
    """Return the numbers of a leaf as one array; for a BCOO matrix, its data."""
    return leaf.data if is_sparse(leaf) else as_jax(leaf)


def as_jax(x: Any) -> jax.Array:
    """Return an array or number of any kind as a JAX array."""
    # On a JAX array `jnp.asarray` is slow: a third of an eager call of 291 leaves.
    return x if isinstance(x, jax.Array) else jnp.asarray(x)


def size_of(x: jax.Array) -> float:
    """Return the number of elements; inf if it is symbolic, as under `jax.export`."""
    return x.size if isinstance(x.size, int) else math.inf


def count_as(count: Any, dtype: DTypeLike) -> Any:
    """Return a number of elements, at least 1, as a float; a symbol as an array."""
    if isinstance(count, int):
        return float(max(count, 1))
    return jnp.maximum(jnp.asarray(count).astype(dtype), 1)


def real_dtype(dtype: DTypeLike) -> DTypeLike:
    """Return the dtype of norms of `dtype`: float64 for 64-bit parts, else float32."""
    return jnp.float64 if jnp.finfo(dtype).bits == 64 else jnp.float32


def widen(x: jax.Array, real: DTypeLike | None = None) -> jax.Array:
    """Return `x` in `real`, or the complex dtype with such parts, for all arithmetic.

    None selects the precision by the dtype of `x`.
    """
    real = jnp.dtype(real_dtype(x.dtype) if real is None else real)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return x.astype(jnp.complex128 if real == jnp.float64 else jnp.complex64)
    return x.astype(real)


def is_narrow(leaf: LeafLike) -> bool:
    """Return whether `widen` changes the dtype of a leaf."""
    return leaf.dtype.itemsize < 4 if hasattr(leaf, "dtype") else False


def narrow(wide: jax.Array, like: jax.Array) -> jax.Array:
    """Return `wide` in the dtype and with the weak type of `like`; one rounding."""
    out = wide.astype(like.dtype)
    # In JAX's public interface only an indexed update keeps a weak type.
    return like.at[...].set(out) if jax.typeof(like).weak_type else out
